"""A step whose loss is far above the last ones is skipped by all ranks alike, as if its batch had never been there."""

from __future__ import annotations

from contextlib import nullcontext
from functools import cache
from typing import Any
from unittest.mock import patch

import pytest
import torch
from support.laid_out import own_rows
from support.muon import problem_of
from support.oracle import Named, build, loss_sum, real_tokens, relative_errors, values
from support.problems import SEED
from support.ranks import ranks
from support.states import LAYOUTS
from torch import Tensor

from meshwright import parallelize
from meshwright.distributed.process import agree
from meshwright.distributed.torch_private import local_part
from meshwright.distributed.weights.shards import whole_on_first
from meshwright.training.health.loss_guard import LossGuard

STEPS, BAD, LR, MAX_NORM, DEVIATIONS, WINDOW = 10, (7, 8), 0.02, 0.3, 4.0, 5
PLACES = ("one", "DDP", "FSDP2", "FSDP2 + TP", "PP, tied", "EP")
WHOLE = {"precision": dict.fromkeys(("master", "compute", "reduce"), "float64")}


def batches(place: str) -> list[dict[str, Tensor]]:
    """The same batch again and again, whose loss falls, and in two steps the labels of other tokens."""
    good = problem_of(LAYOUTS[place][2], 1).data.step(0)
    bad = {**good, "labels": good["labels"].where(good["labels"] < 0, (good["labels"] + 101) % 256)}
    return [bad if step in BAD else good for step in range(STEPS)]


@cache
def reference(place: str) -> Named:
    """Plain AdamW over the good batches alone."""
    problem = problem_of(LAYOUTS[place][2], 1)
    model = build(problem).train()
    routers = [module for module in model.modules() if type(module).__name__ == "Router"]
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=0.1)
    for step, batch in enumerate(batches(place)):
        if step in BAD:
            continue
        loss = loss_sum(model, batch, problem) / real_tokens(batch)
        extra = sum(router.auxiliary for router in routers if router.auxiliary is not None)
        (loss + extra / batch["tokens"].numel()).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        for router in routers:
            router.balance(router.counts)
    return values(model)


def _bits(model: Any, optimizer: Any) -> list[Tensor]:
    tensors = [tensor for p in model.parameters() for tensor in (p.detach(), *optimizer.state[p].values())]
    return [local_part(tensor).clone() for tensor in tensors]


def _train(place: str, mutant: str = "") -> tuple[Named, list[int], bool]:
    """Parameters, the steps that were skipped, and whether these changed no bit of parameters and optimizer."""
    model = parallelize(LAYOUTS[place][2], LAYOUTS[place][1], techniques=WHOLE, seed=SEED)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=0.1)
    guard, skipped, is_same = LossGuard(DEVIATIONS, WINDOW), [], True
    with MUTANTS[mutant]() if mutant else nullcontext():
        for step, batch in enumerate(batches(place)):
            step_loss = model.forward_backward(own_rows(model, batch))
            assert step_loss.tokens == real_tokens(batch), "by which rates may go, on all ranks"
            loss = float(step_loss)
            before = _bits(model, optimizer)
            result = model.optimizer_step(optimizer, MAX_NORM, skip=bool(guard.spike(loss)))
            if result.skipped:
                skipped.append(step)
                is_same &= all(map(torch.equal, before, _bits(model, optimizer)))
            else:
                guard.keep(loss)
    named = {name: p.detach() for name, p in model.named_parameters()}
    return whole_on_first(named, differ=model.plan.pipeline is not None), skipped, is_same


MUTANTS = {
    "verdicts are not followed": lambda: patch.object(agree, "any_rank", lambda flag: False),
    "spikes are remembered": lambda: patch.object(LossGuard, "spike", _remembering),
}
_spike = LossGuard.spike


def _remembering(guard: LossGuard, loss: float) -> str:
    found = _spike(guard, loss)
    guard.losses = [*guard.losses, loss][-WINDOW:] if found else guard.losses
    return found if guard.losses.count(loss) < 2 else ""


@pytest.mark.first("DDP")
@pytest.mark.parametrize("place", PLACES)
def test_a_bad_batch_leaves_no_trace_on_any_layout(spmd, place):
    runs = spmd(LAYOUTS[place][0], _train, place)
    assert all(skipped == list(BAD) and is_same for _, skipped, is_same in runs)
    errors = relative_errors(runs[0][0], reference(place))
    assert max(errors.values()) <= 1e-10, errors


@pytest.mark.all
@pytest.mark.parametrize("mutant", MUTANTS)
def test_faults_are_seen(spmd, mutant):
    whole, skipped, _ = spmd(2, _train, "FSDP2", mutant)[0]
    assert skipped != list(BAD) and max(relative_errors(whole, reference("FSDP2")).values()) > 1e-6


@pytest.mark.all
@ranks(2)
def test_one_ranks_verdict_is_followed_by_all_and_is_no_overflow():
    techniques = {"precision": {"master": "float32", "compute": "float16", "loss_scale": 1024.0}}
    model = parallelize(LAYOUTS["FSDP2"][2], LAYOUTS["FSDP2"][1], techniques=techniques, seed=SEED)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    found = []
    for refusing in (1, None):
        model.forward_backward(own_rows(model, batches("FSDP2")[0]))
        found.append(model.optimizer_step(optimizer, skip=model.mesh.get_rank() == refusing).skipped)
    assert model.loss_scale is not None
    found = found[0], found[1], model.loss_scale.value
    assert found == (True, False, 1024.0)
