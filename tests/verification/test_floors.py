"""How far rounding goes: the farthest of several runs of one process, none of which is the farthest everywhere."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from support.problems import UNTIED
from test_verify import BATCHES, FSDP
from torch import Tensor

from meshwright.comparison.equality import relative_errors
from meshwright.verification import compare as module
from meshwright.verification.compare import references
from meshwright.verification.outcome import Reference, reference
from meshwright.verification.problem import Problem
from meshwright.verification.verify import verify

FLOAT32 = Problem(UNTIED, BATCHES, 2, dtype="float32", optimizer="sgd")
BFLOAT16 = replace(FLOAT32, dtype="bfloat16")
EPS32, EPS16 = torch.finfo(torch.float32).eps, torch.finfo(torch.bfloat16).eps


def more(problem: Problem, orders: tuple[int, ...], noise: float) -> list[Reference]:
    return [
        reference(problem, rows, noise=noise, seed=seed)
        for seed, rows in enumerate(orders + (0,) * (5 if noise else 0), 1)
    ]


def of_float32(one: Reference, noise: float) -> list[dict[str, float]]:
    runs = [reference(FLOAT32, 1, noise=noise), *more(FLOAT32, (2, 3), noise)]
    return [relative_errors(run.gradients, one.gradients) for run in runs]


def of_bfloat16(one: Reference, noise: float) -> list[dict[str, float]]:
    exact = reference(replace(BFLOAT16, dtype="float32"))
    runs = [one, *more(BFLOAT16, (1, 2), noise)]
    return [relative_errors(exact.gradients, run.gradients) for run in runs]


@pytest.mark.all
@pytest.mark.parametrize(
    ("problem", "runs", "are_features_cut", "noise"),
    [
        (FLOAT32, of_float32, False, 0.0),
        (FLOAT32, of_float32, True, EPS32),
        (BFLOAT16, of_bfloat16, False, 0.0),
        (BFLOAT16, of_bfloat16, True, EPS16 / 2),
    ],
    ids=["float32", "float32, features cut", "bfloat16", "bfloat16, features cut"],
)
def test_the_farthest_run_counts(problem: Problem, runs: Callable, are_features_cut: bool, noise: float):
    one, floors = references(problem, are_features_cut=are_features_cut)
    found, each = floors.whole["gradient", 1], runs(one, noise)
    assert found == {name: max(errors[name] for errors in each) for name in one.gradients}
    farthest = [sum(errors[name] == found[name] for name in found) for errors in each]
    assert sum(number > 0 for number in farthest) > 1 and max(farthest) < len(found), (
        "one of them alone would have done"
    )
    assert {stage for stage, _ in floors.whole} == {"gradient", "parameter", "loss", "norm"}
    assert floors.seen["forward", 1].keys() == one.seen[0].forward[1].keys()


class Narrow(torch.nn.Module):
    """Computes in float32 inside."""

    vocab_size = 257

    def __init__(self) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(257, 8)
        self.head = torch.nn.Linear(8, 257)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.embedding(tokens).float().tanh().to(self.head.weight.dtype))


@pytest.mark.parametrize(("model", "runs"), [(UNTIED, 2), (Narrow, 9)], ids=["float64", "float32 inside"])
def test_in_float64_more_runs_are_made_only_where_something_rounds(monkeypatch, model, runs):
    made = []
    monkeypatch.setattr(module, "reference", lambda *args, **kwargs: made.append(args) or reference(*args, **kwargs))
    _, floors = references(Problem(model, BATCHES, 1), are_features_cut=True)
    assert len(made) == runs
    assert floors.round_inside is (model is Narrow)


@pytest.mark.all
def test_a_loss_in_chunks_is_equal_in_float32_by_more_than_a_hair(pool):
    report = verify(UNTIED, FSDP, BATCHES, steps=2, dtypes=("float32",), techniques={"loss_chunks": 3}, pool=pool)
    assert report, report
    worst = max(d.error / d.bound for d in report.comparisons[0].differences if d.bound)
    assert worst < 0.9, "a hair from being called different"
