"""Adafactor steps as torch's own does in one process on every layout, and its sums are those of the plan."""

from __future__ import annotations

from contextlib import nullcontext
from functools import cache
from typing import Any
from unittest.mock import patch

import pytest
import torch
from support.laid_out import Figures, counted, estimated, own_rows
from support.muon import problem_of
from support.oracle import oracle, relative_errors
from support.problems import SEED
from support.states import DENSE, LAYOUTS, SPARSE, bytes_of_state
from torch import nn

from meshwright import Layout, parallelize
from meshwright.core.errors import ConfigError, UnsupportedError
from meshwright.distributed.optimizer import muon
from meshwright.distributed.optimizer.muon import Adafactor
from meshwright.distributed.process.absent_peers import WireCounter
from meshwright.distributed.weights.shards import whole_on_first
from meshwright.planning.build import plan
from meshwright.planning.memory import plan_memory
from meshwright.planning.values import Batch

STEPS, LR, DECAY = 2, 0.03, 0.1
BESIDE = {"CP": (2, Layout(dp_shard=1, cp=2), DENSE), "EP, each in shards": (4, Layout(dp_shard=4, ep=2), SPARSE)}
OF_STATES = ("DDP", "FSDP2", "HSDP", "TP, copies of key heads", "FSDP2 + TP", "PP + FSDP2", "EP", "experts cut inside")
PLACES = {**{place: LAYOUTS[place] for place in OF_STATES}, **BESIDE}
WHOLE = {"precision": dict.fromkeys(("master", "compute", "reduce"), "float64"), "optimizer": "adafactor"}


def of_torch(model: nn.Module) -> torch.optim.Optimizer:
    parameters = list(model.parameters())
    sides = [[p for p in parameters if p.dim() == 1], [p for p in parameters if p.dim() > 1]]
    groups = [{"params": side, "weight_decay": decay} for side, decay in zip(sides, (0.0, DECAY), strict=True)]
    return torch.optim.Adafactor(groups, lr=LR)


@cache
def reference(place: str) -> dict[str, torch.Tensor]:
    return oracle(problem_of(PLACES[place][2], STEPS), make=of_torch).parameters


def _train(place: str, mutant: str = "") -> tuple[dict[str, torch.Tensor], Figures, Figures, tuple[int, int]]:
    """Parameters, whole on rank 0; what the last step sent, as planned and as counted; bytes of state, likewise."""
    _, layout, config = PLACES[place]
    problem = problem_of(config, STEPS)
    model = parallelize(config, layout, techniques=WHOLE, seed=SEED)
    optimizer = Adafactor(model.make_parameter_groups(weight_decay=DECAY), lr=LR)
    with MUTANTS[mutant]() if mutant else nullcontext():
        for batch in problem.data.steps(STEPS):
            with WireCounter() as wire:
                model.forward_backward(own_rows(model, batch))
                model.optimizer_step(optimizer, problem.max_norm)
    model.audit(optimizer)
    named = {name: p.detach() for name, p in model.named_parameters()}
    whole = whole_on_first(named, differ=model.plan.pipeline is not None)
    memory = plan_memory(model.plan, pipeline_rank=0).optimizer, bytes_of_state(optimizer)
    return whole, estimated(model.plan, Batch(problem.data.rows, problem.data.seq)), counted(wire), memory


def _shards_alone(stepped: Any, parts: Any) -> None:
    for one, part in zip(stepped, parts, strict=True):
        one.sums = part


_together = muon._sum_together


def _updates_alone(stepped: Any, parts: Any) -> None:
    (_together if max(map(len, parts)) > 1 else _shards_alone)(stepped, parts)


MUTANTS = {
    "shards_alone": lambda: patch.object(muon, "_sum_together", _shards_alone),
    "updates_alone": lambda: patch.object(muon, "_sum_together", _updates_alone),
}
"""Ranks use their own sums: all of them, or those of updates. (Copies that are counted twice cancel out.)"""


@pytest.mark.first("FSDP2")
@pytest.mark.parametrize("place", PLACES)
def test_a_step_is_that_of_torch_in_one_process_and_sends_what_is_planned(spmd, place):
    runs = spmd(PLACES[place][0], _train, place)
    errors = relative_errors(runs[0][0], reference(place))
    assert max(errors.values()) <= 1e-10, errors
    planned_bytes, held = runs[0][3]
    assert held == planned_bytes
    if PLACES[place][1].pp > 1:  # the plan is that of the rank that sends most
        return
    for _, planned, sent, _ in runs:
        of_sums = {key: figures for key, figures in planned.items() if key[0] == "all_reduce"}
        assert {key for key in sent if key[0] == "all_reduce"} == set(of_sums)
        for key, (calls, moved) in of_sums.items():
            assert sent[key][1] == pytest.approx(moved, rel=1e-12) and calls in (None, sent[key][0]), key


@pytest.mark.parametrize(("mutant", "place"), [("shards_alone", "FSDP2"), ("updates_alone", "FSDP2")])
def test_faults_are_seen(spmd, mutant, place):
    whole, *_ = spmd(PLACES[place][0], _train, place, mutant)[0]
    assert max(relative_errors(whole, reference(place)).values()) > 1e-6


def test_plain_tensors_are_stepped_as_torch_does():
    shapes = (6, 4), (3, 5, 7), (4,), (1, 5), ()
    ours = [nn.Parameter(torch.linspace(-1, 2, max(1, torch.Size(s).numel())).double().view(s)) for s in shapes]
    theirs = [nn.Parameter(parameter.detach().clone()) for parameter in ours]
    both = [Adafactor(ours, lr=0.1, weight_decay=0.1), torch.optim.Adafactor(theirs, lr=0.1, weight_decay=0.1)]
    for step in range(4):
        for mine, other in zip(ours, theirs, strict=True):
            mine.grad = torch.cos(mine.detach() * 3 + step) * 10**step
            other.grad = mine.grad.clone()
        for optimizer in both:
            optimizer.step()
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine.detach(), other.detach(), rtol=1e-13, atol=1e-14)


def test_what_it_cannot_is_refused():
    with pytest.raises(UnsupportedError, match="cpu_offload = optimizer and .*adafactor.*travel together"):
        plan(DENSE, Layout(dp_shard=2), techniques={"optimizer": "adafactor", "cpu_offload": "optimizer"})
    for wrong in ({"lr": -1.0}, {"d": 0.5}, {"beta2_decay": 0.1}, {"eps": (None, -1.0)}):
        with pytest.raises(ConfigError, match=f"Adafactor: .*{next(iter(wrong))}"):
            Adafactor([nn.Parameter(torch.ones(2))], **wrong)
