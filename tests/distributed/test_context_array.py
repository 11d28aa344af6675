"""An array of masks, methods, meshes and modes of recomputation: every two meet in some case, and equal one process.

Techniques that do not look at masks (compilation, offload, pipelines, experts) meet cp in tests/ways.txt.
"""

from __future__ import annotations

from functools import cache
from itertools import combinations, product

import pytest
import torch
import torch.nn.functional as F
from support.laid_out import own_rows
from support.masks import FACTORS, MODELS, UPCASTS, Case, batch_of, cases, pairs_of
from support.oracle import relative_errors
from torch import Tensor, nn

from meshwright import parallelize
from meshwright.distributed.process.workers import WorkerPool

CASES = {str(case): case for case in cases()}
Found = tuple[float, dict[str, Tensor]]


def build(mask: str) -> nn.Module:
    torch.manual_seed(5)
    return MODELS[mask]().double()


def of_one_process(mask: str) -> Found:
    """Loss and gradients by plain torch."""
    torch.set_default_dtype(torch.float32)
    model, batch = build(mask).train(), batch_of(mask)
    labels = batch.pop("labels")
    if mask in ("causal", "full") or "document_ids" in batch:
        output = model(**batch)
    else:
        names = {"tokens": "input_ids", "positions": "position_ids", "attention_mask": "attention_mask"}
        output = model(**{names[key]: value for key, value in batch.items()}).logits
    loss = F.cross_entropy(output.flatten(0, 1).double(), labels.flatten(), ignore_index=-100)
    loss.backward()
    return loss.item(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def of_ranks(case: Case) -> Found:
    rows = 1 if case.rows == "one by one" else 0
    model = parallelize(build(case.mask), case.layout, techniques=case.techniques, microbatch_rows=rows)
    loss = model.forward_backward(own_rows(model, batch_of(case.mask))).loss
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return float(loss), {name: getattr(g, "full_tensor", lambda g=g: g)() for name, g in found.items()}


@cache
def expected(pool: WorkerPool, mask: str) -> Found:
    return pool.run(of_one_process, mask, world=1)[0]


def assert_equal(found: list[Found], reference: Found, bound: float) -> None:
    loss, gradients = reference
    assert len({str(mine) for mine, _ in found}) == 1, "ranks report the same loss"
    assert abs(found[0][0] - loss) <= bound * abs(loss)
    errors = relative_errors(found[0][1], gradients)
    assert max(errors.values()) <= bound, max(errors.items(), key=lambda item: item[1])


@pytest.mark.first("mask documents, method halo")
@pytest.mark.parametrize("name", CASES)
def test_rows_that_are_cut_compute_what_one_process_does(pool, name):
    case = CASES[name]
    found = pool.run(of_ranks, case, world=case.layout.world, timeout=180)
    assert_equal(found, expected(pool, case.mask), 1e-6 if case.mask in UPCASTS else 1e-10)


def test_every_two_values_meet():
    met = set().union(*(pairs_of(case) for case in CASES.values()))
    for (one, values), (other, others) in combinations(FACTORS.items(), 2):
        for x, y in product(values, others):
            apart = not any(Case(**{"cp": cp, one: x, other: y}).is_legal for cp in FACTORS["cp"])  # type: ignore[arg-type]
            assert apart or ((one, x), (other, y)) in met, (x, y)


@pytest.mark.all
@pytest.mark.parametrize("method", ["ulysses_ring", "auto"])
def test_eight_ranks_compute_what_one_does(pool, method):
    with WorkerPool(8, threads=1) as eight:
        found = eight.run(of_ranks, Case("documents", method, 8), timeout=300)
    assert_equal(found, expected(pool, "documents"), 1e-10)
