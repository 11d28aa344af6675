"""Muon steps as one process does on every layout, each matrix once, and its messages are the plan's."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from support.muon import LR, MOMENTUM, PlainMuon, Run, problem_of, train
from support.oracle import oracle, relative_errors
from support.ranks import ranks, refusal
from support.states import DENSE, LAYOUTS, SPARSE
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from meshwright import Layout
from meshwright.core.errors import ConfigError
from meshwright.distributed import DistributedConfig, init_distributed
from meshwright.distributed.optimizer.muon import Muon

STEPS = 2
BESIDE = {
    "CP": (2, Layout(dp_shard=1, cp=2), DENSE),
    "EP + TP": (4, Layout(dp_shard=2, tp=2, ep=2), SPARSE),
    "EP, each in shards": (4, Layout(dp_shard=4, ep=2), SPARSE),
    "EP, replicas": (4, Layout(dp_replicate=2, dp_shard=2, ep=2), SPARSE),
}
OF_STATES = (
    "one",
    "DDP",
    "FSDP2",
    "HSDP",
    "TP, copies of key heads",
    "FSDP2 + TP",
    "PP + FSDP2",
    "EP",
    "experts cut inside",
)
PLACES = {**{place: LAYOUTS[place] for place in OF_STATES}, **BESIDE}


@cache
def reference(place: str) -> dict[str, torch.Tensor]:
    return oracle(problem_of(PLACES[place][2], STEPS), make=PlainMuon).parameters


def errors(runs: list[Run], place: str) -> dict[str, float]:
    return relative_errors(runs[0].parameters, reference(place))


@pytest.mark.first("FSDP2")
@pytest.mark.parametrize("place", PLACES)
def test_a_step_is_that_of_one_process_and_sends_what_is_planned(spmd, place):
    world, layout, model = PLACES[place]
    runs = spmd(world, train, layout, problem_of(model, STEPS))
    assert max(errors(runs, place).values()) <= 1e-10, errors(runs, place)
    assert [run.sent for run in runs] == [run.planned for run in runs]
    assert runs[0].held == runs[0].planned_bytes
    assert {run.messages for run in runs} == {run.planned_messages for run in runs}
    if "EP" not in place:  # where tokens are sent to experts too
        assert {run.most for run in runs} == {max(run.sent for run in runs)}


@pytest.mark.parametrize(
    ("mutant", "place"),
    [
        ("shards_alone", "FSDP2"),
        ("one_rank_gets_nothing", "FSDP2"),
        ("embedding_by_muon", "one"),
        ("stale_momentum", "one"),
        ("scaled_by_rows", "one"),
    ],
)
def test_faults_are_seen(spmd, mutant, place):
    world, layout, model = PLACES[place]
    runs = spmd(world, train, layout, problem_of(model, STEPS), mutant)
    assert max(errors(runs, place).values()) > 1e-3


SHAPES = (5, 6), (8, 4), (4, 6, 4), (8, 6), (3,)
"""The first does not divide."""


def _on_whole_tensors() -> list[torch.Tensor]:
    model = nn.ParameterDict()
    for number, shape in enumerate(SHAPES):
        whole = torch.randn(shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
        model[f"{number}"] = nn.Parameter(whole)
    begun = [p.detach().clone() for p in model.values()]
    optimizer = PlainMuon(model, hidden=("0", "1", "2"), betas=(0.9, 0.95), eps=1e-8, decay_of_vectors=0.1)
    for step in range(2):
        for number, parameter in enumerate(model.values()):
            parameter.grad = None if number == 3 else torch.cos(begun[number] * (step + 1))
        optimizer.step()
    return [p.detach() for p in model.values()]


@pytest.mark.parametrize("shared", [False, True], ids=("own meshes", "one mesh"))
@ranks(4)
def test_dtensors_without_a_model_step_as_whole_ones(shared):
    """Two steps of plain DTensors without a model; the fourth never has a gradient."""
    init_distributed(DistributedConfig(dp_shard=4))
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_shard", "tp"))
    ways = [
        (mesh, (Shard(0), Shard(1))),
        (mesh["tp"], (Shard(0),)),
        (mesh, (Shard(0), Shard(1))),
        (mesh, (Shard(0),) * 2),
    ]
    wholes = [torch.randn(shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64) for shape in SHAPES]
    parameters = [
        nn.Parameter(distribute_tensor(whole, *way, src_data_rank=None) if way else whole.clone())
        for whole, way in zip(wholes, (*ways, None), strict=True)
    ]
    groups = [{"params": parameters[:4], "use_muon": True}, {"params": parameters[4:], "use_muon": False}]
    optimizer = Muon(groups, lr=LR, momentum=MOMENTUM)
    if shared:
        optimizer.share_out(mesh)
    for step in range(2):
        for number, parameter in enumerate(parameters):
            gradient = torch.cos(wholes[number] * (step + 1))
            way = (*ways, None)[number]
            parameter.grad = distribute_tensor(gradient, *way, src_data_rank=None) if way else gradient
            if number == 3:
                parameter.grad = None
        optimizer.step()
    found = [p.full_tensor().detach() if isinstance(p, DTensor) else p.detach() for p in parameters]
    for mine, wanted in zip(found, _on_whole_tensors(), strict=True):
        torch.testing.assert_close(mine, wanted, rtol=1e-11, atol=1e-12)


@ranks(2)
def test_a_mesh_without_a_matrixs_ranks_is_refused():
    init_distributed(DistributedConfig(dp_shard=2))
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp_shard",))
    parameter = nn.Parameter(distribute_tensor(torch.ones(4, 4), mesh, [Shard(0)], src_data_rank=None))
    parameter.grad = torch.ones_like(parameter)
    optimizer = Muon([{"params": [parameter], "use_muon": True}])
    optimizer.share_out(None)
    words = refusal(lambda: optimizer.step(), ConfigError)
    assert "shape (4, 4) lies on the ranks [0, 1]" in words and "share_out" in words
