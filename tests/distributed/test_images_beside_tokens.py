"""Models of images and text on layouts: equal to one process of plain torch, in fp64, images dealt by rows."""

import functools

import pytest
import torch
from support.oracle import relative_errors
from support.pictures import FAMILIES, ROWS, one_process, plain, rows_of_step, together

import meshwright
from meshwright.distributed.mesh import data_position
from meshwright.distributed.weights.wholes import whole_on_first
from meshwright.planning.layout import Layout

STEPS, BOUND = 2, 1e-6
"""The towers and the text models compute norms and rotary tables in float32."""


def trained(family, sizes, images, rows, techniques, given=True, changes=None):
    """Losses, first gradients and last weights on a layout; each data rank brings its own rows."""
    model = plain(family, **(changes or {}))
    techniques = {"precision": {"master": "float64", "compute": "float64"}, **techniques}
    laid_out = meshwright.parallelize(model, Layout(**sizes), techniques=techniques, microbatch_rows=rows)
    rank, ranks = data_position(laid_out.mesh)
    trainable = [p for p in laid_out.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(trainable, lr=0.1) if trainable else None
    losses, gradients, differ = [], {}, laid_out.plan.pipeline is not None
    for step in range(STEPS):
        everything = rows_of_step(family, step, images)
        own = len(everything) // ranks
        batch = together(family, everything[rank * own : (rank + 1) * own])
        if not given:
            del batch["images_per_row"]
        losses.append(laid_out.forward_backward(batch).loss)
        if not step:
            found = {name: p.grad for name, p in laid_out.named_parameters() if p.grad is not None}
            gradients = whole_on_first(found, differ=differ)
        laid_out.optimizer_step(optimizer)
    return losses, gradients, whole_on_first(dict(laid_out.named_parameters()), differ=differ)


@functools.cache
def oracle(family, images=ROWS, frozen="", **changes):
    return one_process(family, STEPS, images, frozen, **changes)


def assert_equal(found, wanted, bound=BOUND):
    assert found[0] == pytest.approx(wanted[0], rel=bound)
    for mine, theirs in zip(found[1:], wanted[1:], strict=True):
        errors = relative_errors(mine, theirs)
        assert {name: error for name, error in errors.items() if not error <= bound} == {}


@pytest.mark.parametrize("family", FAMILIES)
def test_ranks_and_microbatches_without_images(spmd, family):
    found = spmd(2, trained, family, {"dp_shard": 2}, ROWS, 1, {})[0]
    assert_equal(found, oracle(family))
