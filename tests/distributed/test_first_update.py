"""An optimizer's first step derives no placements of long lists, and computes what torch does."""

from __future__ import annotations

import sys

import pytest
import torch
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from meshwright import Layout
from meshwright.distributed.optimizer.step import OnShares, step
from meshwright.distributed.setup import init_distributed
from meshwright.distributed.torch_private import shares_in_lists
from meshwright.planning.optimizer import OptimizerPlan

KINDS = {"AdamW": "fused", "Adam": "foreach", "SGD": "foreach", "NAdam": "foreach", "Adagrad": "foreach"}


def updated(kind, own):
    """Return new values, and how often torch asked how an operator's results lie."""
    mesh = init_distributed(Layout(dp_shard=2), 0)["dp_shard"]
    torch.manual_seed(0)
    placed = [distribute_tensor(torch.randn(5, 4), mesh, [where]) for where in [Shard(0), Replicate()] * 6]
    parameters = [torch.nn.Parameter(tensor) for tensor in placed]
    optimizer = getattr(torch.optim, kind)(parameters, lr=1e-2, **{KINDS[kind]: True})
    asked = 0

    def count(frame, event, argument):
        nonlocal asked
        asked += event == "call" and frame.f_code.co_name == "propagate_op_sharding_non_cached"

    for _ in range(2):
        for parameter in parameters:
            parameter.grad = parameter.detach() * 0.5 + 0.1
        sys.setprofile(count)
        try:
            step(optimizer, OptimizerPlan(), torch.device("cpu")) if own else optimizer.step()
        finally:
            sys.setprofile(None)
    states = [value for p in parameters for value in optimizer.state[p].values() if value.dim()]
    assert all(isinstance(value, DTensor) for value in states)
    return [value.detach().full_tensor() for value in (*parameters, *states)], asked


@pytest.mark.parametrize("kind", KINDS)
def test_updates_are_those_of_torch_and_ask_less_for_placements(kind, spmd):
    for (ours, few), (torchs, many) in zip(spmd(2, updated, kind, True), spmd(2, updated, kind, False), strict=True):
        assert all(map(torch.equal, ours, torchs))
        assert few < many


def judged():
    mesh = init_distributed(Layout(dp_shard=2), 0)["dp_shard"]
    cut, whole = (distribute_tensor(torch.ones(4), mesh, [where]) for where in (Shard(0), Replicate()))
    partial = DTensor.from_local(torch.ones(4), mesh, [Partial()], run_check=False)
    refused = [[[partial]], [[cut], [whole]], [[cut], [torch.ones(4)]], [[cut], cut]]
    return [shares_in_lists(lists) for lists in refused], shares_in_lists([[cut], [torch.ones(())], 1.0])


def test_shares_suffice_for_tensors_that_lie_alike_alone(spmd):
    for refused, taken in spmd(2, judged):
        assert refused == [None] * 4
        assert taken[0][0].shape == (2,) and taken[2] == 1.0


def raised():
    mesh = init_distributed(Layout(dp_shard=2), 0)["dp_shard"]
    exponents = [distribute_tensor(torch.arange(4.0), mesh, [Shard(0)])]
    with OnShares():
        return [x.full_tensor() for x in torch._foreach_pow(2.0, exponents)], torch._foreach_pow(2.0, [torch.ones(2)])


def test_a_number_may_stand_before_the_lists(spmd):
    for cut, whole in spmd(2, raised):
        assert cut[0].tolist() == [1, 2, 4, 8] and whole[0].tolist() == [2, 2]
