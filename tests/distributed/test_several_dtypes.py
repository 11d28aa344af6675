"""Parameters of several dtypes: kept where nothing needs one, converted where the user asked, else refused."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from support.users import VOCABULARY, User
from torch import nn
from torch.distributed.tensor import DTensor

from meshwright import Layout, UnsupportedError, parallelize, plan
from meshwright.distributed.mesh import data_position

LAYOUTS = {"one process": (1, {"dp_shard": 1}), "ddp": (2, {"dp_replicate": 2, "dp_shard": 1})}
CUT = ({"dp_shard": 2}, {"tp": 2, "dp_shard": 1}, {"pp": 2, "dp_shard": 1}, {"cp": 2, "dp_shard": 1})


class InFront(User):
    """A float64 parameter that is registered first."""

    def __init__(self):
        nn.Module.__init__(self)
        self.temperature = nn.Parameter(torch.ones(1, dtype=torch.float64))
        before = self.temperature
        super().__init__()
        self.temperature = before
        self._parameters["temperature"] = self._parameters.pop("temperature")

    def logits(self, x):
        return super().logits(x) * self.temperature


class Behind(User):
    def __init__(self):
        super().__init__()
        self.temperature = nn.Parameter(torch.ones(1, dtype=torch.float64))

    def logits(self, x):
        return super().logits(x) * self.temperature


def made(kind):
    torch.manual_seed(0)
    return kind()


def batch():
    tokens = torch.arange(24).view(4, 6) % VOCABULARY
    return {"tokens": tokens, "labels": tokens.roll(-1, 1)}


def step(kind, sizes, techniques):
    model = parallelize(made(kind), Layout(**sizes), techniques=techniques, audit=True)
    rank, ranks = data_position(model.mesh)
    loss = model.forward_backward({key: value.chunk(ranks)[rank] for key, value in batch().items()}).loss
    gradients = {
        n: p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad for n, p in model.named_parameters()
    }
    return float(loss), {n: (p.dtype, gradients[n].dtype, gradients[n].double()) for n, p in model.named_parameters()}


@pytest.mark.parametrize("kind", [InFront, Behind])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_each_parameter_keeps_its_own(layout, kind, spmd):
    world, sizes = LAYOUTS[layout]
    model = made(kind)
    given = batch()
    F.cross_entropy(model(given["tokens"]).flatten(0, 1), given["labels"].flatten()).backward()
    for _, found in spmd(world, step, kind, sizes, {}):
        for name, parameter in model.named_parameters():
            dtype, of_gradient, gradient = found[name]
            assert dtype == of_gradient == parameter.dtype, name
            assert (gradient - parameter.grad.double()).norm() <= 1e-5 * parameter.grad.double().norm() + 1e-9, name


@pytest.mark.parametrize("sizes", CUT, ids=str)
@pytest.mark.parametrize("kind", [InFront, Behind])
def test_a_layout_that_needs_one_names_parameter_dtypes_and_setting(kind, sizes):
    words = r"'temperature' is float64, and most elements of \w+ are float32 .* techniques.precision.master = float64"
    with pytest.raises(UnsupportedError, match=words):
        plan(made(kind), Layout(**sizes))


def test_the_advice_is_followed(spmd):
    expected, alone = spmd(1, step, Behind, {"dp_shard": 1}, {"precision": {"master": "float64"}})[0]
    assert all(dtype == torch.float64 for dtype, _, _ in alone.values())
    for loss, found in spmd(2, step, Behind, {"dp_shard": 2}, {"precision": {"master": "float64"}}):
        assert abs(loss - expected) <= 1e-12 * expected
        assert all(dtype == torch.float64 for dtype, _, _ in found.values())
