"""Dropout: ranks with different rows draw different numbers, ranks with the same rows the same, and recomputation
what the forward drew.
"""

from __future__ import annotations

import json

import pytest
from support import broken, composed
from test_verify import DDP, FSDP, HSDP, even

from meshwright.comparison.equality import Comparison
from meshwright.core.errors import IntegrityError
from meshwright.planning.layout import Layout
from meshwright.verification.problem import Problem
from meshwright.verification.sight import nature, random_differences
from meshwright.verification.verify import verify

pytestmark = pytest.mark.all

TP = Layout(dp_shard=1, tp=2)
CHECKPOINTED = {"activation_checkpointing": "full"}
EVALUATED = (
    "compared in evaluation mode: with all dropout layers switched off, the output of the whole model still changes"
    " from forward to"
    " forward in training mode",
)


@pytest.mark.parametrize("layout", [DDP, FSDP, HSDP], ids=str)
@pytest.mark.parametrize("techniques", [{}, CHECKPOINTED], ids=["", "checkpointed"])
def test_our_layouts_draw_what_they_should(pool, layout, techniques):
    report = verify(composed.Dropping, layout, even, steps=1, techniques=techniques, dtypes=("float64",), pool=pool)
    assert report and not report.comparisons[0].notes, report
    found = report.comparisons[0].differences
    assert [d.name for d in found if d.stage == "random"] == ["blocks.0.drop"]
    assert ("blocks.0.drop" in {d.name for d in found if d.stage == "recomputed"}) is bool(techniques)


@pytest.mark.kills("verify", "name")
@pytest.mark.parametrize(
    ("name", "place"),
    [
        ("ranks_seeded_alike", "the random numbers in blocks.0.drop (dropout), on ranks 0 and 1"),
        ("recomputed_with_other_random_numbers", "what the backward recomputes of blocks.0.drop"),
        ("seeded_at_every_step", "the random numbers in blocks.0.drop (dropout)"),
    ],
)
def test_a_fault_is_found_where_it_is(spmd, name, place):
    problem = Problem(composed.Dropping, even, techniques=CHECKPOINTED)
    known = spmd(1, nature, problem)[0]
    found = Comparison("float64", tuple(random_differences(spmd(2, broken.drawn, name, problem, FSDP)[0], known)))
    assert found.first is not None and found.first.place == place and found.first.error > 0.1
    assert len({d.stage for d in found.differences if d.is_beyond}) == 1, found.lines()


@pytest.mark.parametrize(
    ("model", "layout", "composition", "said"),
    [
        (composed.Dropping, DDP, "torchs_ddp", ""),
        (
            composed.Dropping,
            DDP,
            "seeded_alike",
            "wrong are the random numbers in blocks.0.drop (dropout), on ranks 0 and 1: equal, and ranks that hold"
            " different rows must",
        ),
        (composed.Dropping, TP, "tensor_parallel_dropping", ""),
        (
            composed.Dropping,
            TP,
            "tensor_parallel_seeded_by_rank",
            "wrong are the random numbers in blocks.0.drop (dropout), on ranks 0 and 1: different, and ranks that"
            " hold the same rows must",
        ),
    ],
)
def test_somebody_elses_composition_is_judged_by_what_it_draws(pool, model, layout, composition, said):
    report = verify(
        model, layout, even, parallelize_fn=getattr(composed, composition), steps=1, dtypes=("float64",), pool=pool
    )
    assert bool(report) is not bool(said) and said in str(report), report


@pytest.mark.parametrize("composition", [None, "torchs_ddp"])
def test_dropout_that_no_layer_owns_is_compared_in_evaluation_mode_and_drawn_in_training_mode(pool, composition):
    theirs = getattr(composed, composition) if composition else None
    report = verify(composed.DroppingByFunction, DDP, even, parallelize_fn=theirs, steps=2, pool=pool)
    assert report and [c.notes for c in report.comparisons] == [EVALUATED, EVALUATED], report
    assert "random     equal" in str(report) and EVALUATED[0] in str(report)
    assert json.loads(report.to_json())["comparisons"][0]["notes"] == list(EVALUATED)


@pytest.mark.first
def test_a_model_that_always_draws_is_refused_with_the_place(pool):
    with pytest.raises(
        IntegrityError, match=r"in evaluation mode too \(first: the output of blocks.1.inner\).*Draw them only where"
    ):
        verify(composed.AlwaysDropping, DDP, even, steps=1, pool=pool)


class Uncopied(composed.Dropping):
    """Keeps a tensor with a graph, which nothing can copy."""

    def __init__(self):
        super().__init__()
        self.kept = 2 * self.head.weight


def test_a_model_that_cannot_be_copied_is_looked_at_too(pool):
    report = verify(Uncopied, DDP, even, steps=1, dtypes=("float64",), pool=pool)
    assert report and "random     equal" in str(report), report
