"""Whole tensors from shards: the same as one by one, whatever the shapes, the placements and how many travel
together.
"""

from __future__ import annotations

import math
from unittest.mock import patch

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from meshwright.distributed.process.absent_peers import WireCounter
from meshwright.distributed.setup import init_distributed
from meshwright.distributed.weights import shards
from meshwright.distributed.weights.shards import whole_on_first
from meshwright.planning.layout import Layout

SHAPES = [(7,), (1,), (5, 3), (1, 2, 3), (0, 3), (33, 2)]
PLACEMENTS = [
    (Replicate(), Shard(0)),
    (Shard(0), Replicate()),
    (Replicate(), Replicate()),
    (Shard(0), Shard(0)),
    (Shard(0), Shard(1)),
]


def two_by_two() -> DeviceMesh:
    return init_distributed(Layout(dp_replicate=2, dp_shard=2))["dp_replicate", "dp_shard"]


def drawn(dtype: torch.dtype) -> dict[str, tuple[Tensor, DTensor]]:
    mesh = two_by_two()
    found = {}
    for shape in SHAPES:
        for placements in PLACEMENTS:
            if placements[1] == Shard(1) and len(shape) == 1:
                continue
            whole = torch.randn(shape, generator=torch.Generator().manual_seed(len(found)), dtype=torch.float64).to(
                dtype
            )
            if whole.numel() > 2:
                whole.view(-1)[:2] = torch.tensor([math.nan, -math.inf])
            found[f"{dtype} {shape} {placements}"] = whole, distribute_tensor(whole, mesh, placements)
    return found


def gathered(elements: int) -> tuple[int, list[str], int]:
    """(tensors that came, names of those that are not the whole tensor, collectives), of tensors that travel
    ``elements`` together.
    """
    cases = drawn(torch.float64) | drawn(torch.float32)
    with patch.object(shards, "PACK_ELEMENTS", elements), WireCounter() as wire:
        found = whole_on_first({name: tensor for name, (_, tensor) in cases.items()})
    wrong = [name for name, whole in found.items() if not is_same(whole, cases[name][0])]
    return len(found), wrong if list(found) in ([], list(cases)) else ["in another order"], len(wire.sent)


def is_same(found: Tensor, there: Tensor) -> bool:
    return (
        found.dtype == there.dtype
        and found.shape == there.shape
        and torch.equal(found.nan_to_num(7), there.nan_to_num(7))
    )


@pytest.mark.all
def test_whole_tensors_come_to_the_first_rank_and_few_collectives_carry_them(spmd):
    number = 2 * (len(SHAPES) * len(PLACEMENTS) - 2)
    for elements, collectives in ((1, None), (50, None), (2**20, 2)):
        results = spmd(4, gathered, elements)
        assert [count for count, _, _ in results] == [number, 0, 0, 0] and not results[0][1]
        assert collectives is None or {sent for _, _, sent in results} == {collectives}, "one for each dtype"


def others() -> dict[str, Tensor]:
    """What is no shard of a mesh over all ranks: a plain tensor, one that is yet to be summed, one on half of the
    ranks.
    """
    mesh = two_by_two()
    rank = torch.distributed.get_rank()
    half = DTensor.from_local(torch.full((1,), float(rank)), mesh["dp_shard"], (Shard(0),))
    summed = DTensor.from_local(torch.full((2,), 1.5), mesh, (Replicate(), Partial()))
    return whole_on_first({"plain": torch.arange(3.0) + rank, "half": half, "summed": summed})


def test_what_cannot_travel_together_comes_as_rank_0_has_it(spmd):
    found, *empty = spmd(4, others)
    assert empty == [{}, {}, {}]
    assert {name: tensor.tolist() for name, tensor in found.items()} == {
        "plain": [0, 1, 2],
        "half": [0, 1],
        "summed": [3, 3],
    }
