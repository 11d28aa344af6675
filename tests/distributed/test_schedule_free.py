"""Schedule-free AdamW trains as the paper's algorithm does in one process on every layout, and is evaluated, gathered
and saved at its average.
"""

from __future__ import annotations

import copy
from contextlib import nullcontext
from functools import cache
from typing import Any
from unittest.mock import patch

import pytest
import torch
from support.laid_out import own_rows
from support.muon import problem_of
from support.oracle import Named, build, loss_sum, oracle, real_tokens, relative_errors
from support.problems import SEED
from support.ranks import ranks
from support.states import DENSE, LAYOUTS, SPARSE
from torch import Tensor, nn

from meshwright import Layout, load, parallelize, save
from meshwright.distributed import averaging
from meshwright.distributed.averaging import ScheduleFreeAdamW
from meshwright.distributed.weights.shards import whole_on_first
from meshwright.training.optimizer import LearningRateSchedule, make_optimizer

STEPS, LR, BETAS, EPS, DECAY, WARMUP = 4, 0.03, (0.9, 0.95), 1e-6, 0.1, 3
BESIDE = {"CP": (2, Layout(dp_shard=1, cp=2), DENSE), "EP, each in shards": (4, Layout(dp_shard=4, ep=2), SPARSE)}
OF_STATES = (
    "DDP",
    "FSDP2",
    "HSDP",
    "TP, copies of key heads",
    "FSDP2 + TP",
    "PP, tied",
    "PP + FSDP2",
    "EP",
    "experts cut inside",
)
PLACES = {**{place: LAYOUTS[place] for place in OF_STATES}, **BESIDE}
WHOLE = {"precision": dict.fromkeys(("master", "compute", "reduce"), "float64"), "optimizer": "schedule_free_adamw"}


class Paper(torch.optim.Optimizer):
    """Algorithm 1 of arXiv 2405.15682, its three points written out."""

    def __init__(self, model: nn.Module):
        self.named = dict(model.named_parameters())
        self.points = {name: (p.detach().clone(), p.detach().clone()) for name, p in self.named.items()}
        self.squares = {name: torch.zeros_like(p) for name, p in self.named.items()}
        self.rates: list[float] = []
        super().__init__(list(self.named.values()), {})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        t = len(self.rates) + 1
        self.rates.append(LR * min(1, t / WARMUP) * (1 - BETAS[1] ** t) ** 0.5)
        share = self.rates[-1] ** 2 / sum(rate**2 for rate in self.rates)
        for name, y in self.named.items():
            x, z = self.points[name]
            v = self.squares[name] = BETAS[1] * self.squares[name] + (1 - BETAS[1]) * y.grad**2
            decay = DECAY if y.dim() > 1 else 0.0
            z = z - self.rates[-1] * (y.grad / (v.sqrt() + EPS) + decay * y)
            x = (1 - share) * x + share * z
            self.points[name] = x, z
            y.copy_((1 - BETAS[0]) * z + BETAS[0] * x)


@cache
def reference(place: str) -> tuple[Named, Named, float]:
    """Parameters behind the last step, their averages, and the loss of a batch at these."""
    problem, made = problem_of(PLACES[place][2], STEPS), list[Paper]()

    def make(model: nn.Module) -> Paper:
        made.append(Paper(model))
        return made[0]

    trained = oracle(problem, make=make).parameters
    averages = {name: x for name, (x, _) in made[0].points.items()}
    model, batch = build(problem), problem.data.step(STEPS)
    model.load_state_dict(averages, strict=False)
    with torch.no_grad():
        return trained, averages, float(loss_sum(model, batch, problem)) / real_tokens(batch)


def laid_out(place: str, seed: int = SEED) -> tuple[Any, Any]:
    model = parallelize(PLACES[place][2], PLACES[place][1], techniques=WHOLE, seed=seed)
    groups, named = model.make_parameter_groups(weight_decay=DECAY), model.named_parameters()
    options: dict[str, Any] = {"betas": BETAS, "eps": EPS}
    return model, make_optimizer(groups, lr=LR, plan=model.plan.optimizer, named_parameters=named, **options).optimizer


def take(model: Any, optimizer: Any, steps: range, place: str, *, between: bool = False) -> None:
    problem, schedule = problem_of(PLACES[place][2], STEPS), LearningRateSchedule(LR, 100, "constant", WARMUP)
    for step in steps:
        batch = problem.data.step(step)
        schedule.apply(optimizer, step)
        model.forward_backward(own_rows(model, batch))
        model.optimizer_step(optimizer, problem.max_norm)
        if between:
            model.evaluate(own_rows(model, batch))


def held(model: Any, optimizer: Any) -> list[Tensor]:
    """This rank's parameters and their state, as plain tensors."""
    tensors = [tensor for p in model.parameters() for tensor in (p.detach(), *optimizer.state[p].values())]
    return [averaging.local_part(tensor).clone() for tensor in tensors]


def _whole(model: Any) -> Named:
    named = {name: p.detach() for name, p in model.named_parameters()}
    return whole_on_first(named, differ=model.plan.pipeline is not None)


def _train(place: str, folder: str, mutant: str = "") -> tuple[Named, Named, Named, float, bool]:
    """Parameters, averages as gathered and as saved, the loss at them, and whether evaluating left every bit."""
    model, optimizer = laid_out(place)
    with MUTANTS[mutant]() if mutant else nullcontext():
        take(model, optimizer, range(STEPS), place, between=True)
        before = held(model, optimizer)
        loss = float(model.evaluate(own_rows(model, problem_of(PLACES[place][2], STEPS).data.step(STEPS))))
        averages = model.state_dict()
        save(model, folder, optimizer=optimizer)
    is_same = all(map(torch.equal, before, held(model, optimizer)))
    model.audit(optimizer)
    trained = _whole(model)
    fresh, _ = laid_out(place, seed=99)
    load(fresh, folder)
    return trained, averages, _whole(fresh), loss, is_same


def _stays(optimizer: ScheduleFreeAdamW) -> None:
    optimizer._is_averaged = False
    for state in optimizer.state.values():
        state.pop(averaging.TRAINED, None)


MUTANTS = {
    "evaluated where it trains": lambda: patch.object(ScheduleFreeAdamW, "eval", lambda self: None),
    "average of equal shares": lambda: patch.object(averaging, "foreach_between_", lambda ys, zs, share: None),
    "average not taken back": lambda: patch.object(ScheduleFreeAdamW, "train", _stays),
}


@pytest.mark.parametrize("place", PLACES)
def test_a_run_is_the_papers_and_its_average_is_what_is_evaluated_gathered_and_saved(spmd, tmp_path, place):
    runs = spmd(PLACES[place][0], _train, place, str(tmp_path / "at"))
    trained, averages, loss = reference(place)
    assert all(is_same and abs(found - loss) <= 1e-10 * loss for *_, found, is_same in runs)
    whole, gathered, saved, *_ = runs[0]
    assert max(relative_errors(whole, trained).values()) <= 1e-10
    known = {name: tensor for name, tensor in gathered.items() if name in averages}
    assert max(relative_errors(known, averages).values()) <= 1e-10
    assert saved.keys() == averages.keys() and all(torch.equal(saved[name], gathered[name]) for name in saved)
    assert max(relative_errors(averages, trained).values()) > 1e-4


@pytest.mark.all
@pytest.mark.parametrize("mutant", MUTANTS)
def test_faults_are_seen(spmd, tmp_path, mutant):
    whole, gathered, *_ = spmd(2, _train, "FSDP2", str(tmp_path / "at"), mutant)[0]
    trained, averages, _ = reference("FSDP2")
    errors = {
        **relative_errors(whole, trained),
        **{f"x {k}": v for k, v in relative_errors(gathered, averages).items()},
    }
    assert max(errors.values()) > 1e-6


@pytest.mark.all
@pytest.mark.parametrize("place", ["FSDP2", "FSDP2 + TP", "PP, tied", "EP"])
@ranks(lambda place: PLACES[place][0])
def test_a_resumed_run_is_the_undisturbed_one_bit_by_bit(tmp_path, place):
    folder = str(tmp_path / "at")
    model, optimizer = laid_out(place)
    take(model, optimizer, range(2), place)
    save(model, folder, optimizer=optimizer)
    take(model, optimizer, range(2, STEPS), place)
    again, other = laid_out(place, seed=99)
    load(again, folder, optimizer=other)
    take(again, other, range(2, STEPS), place)
    plain, unsaved = laid_out(place)
    take(plain, unsaved, range(STEPS), place)
    mine = held(model, optimizer)
    found = all(map(torch.equal, mine, held(again, other))), all(map(torch.equal, mine, held(plain, unsaved)))
    assert found == (True, True)


@pytest.mark.all
@ranks(2)
def test_loaded_weights_begin_anew_and_copies_are_averages():
    model, optimizer = laid_out("FSDP2")
    begun = model.state_dict()
    take(model, optimizer, range(2), "FSDP2")
    trained = [averaging.local_part(p.detach()).clone() for p in model.parameters()]
    copied = copy.deepcopy(model)
    averages = model.state_dict()
    is_copy = all(torch.equal(averages[name], tensor) for name, tensor in copied.state_dict().items())
    copied.load_state_dict(begun)
    is_copy &= all(torch.equal(begun[name], tensor) for name, tensor in copied.state_dict().items())
    is_left = all(map(torch.equal, trained, (averaging.local_part(p.detach()) for p in model.parameters())))
    model.load_state_dict(begun)
    is_loaded = all(torch.equal(begun[name], tensor) for name, tensor in model.state_dict().items())
    take(model, optimizer, range(1), "FSDP2")
    first = held(model, optimizer)
    fresh, other = laid_out("FSDP2")
    take(fresh, other, range(1), "FSDP2")
    assert (is_copy and is_left, is_loaded, all(map(torch.equal, first, held(fresh, other)))) == (True, True, True)
