"""Faults in a step's later parts, at one rank or one step only: each is named where it first shows.

The original is called equal.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from support import broken, faults
from support.problems import TIED, UNTIED
from test_verify import BATCHES, DDP, FSDP, HSDP

import meshwright
from benchmarks.faults import library
from benchmarks.survey.matrix import CUTTABLE
from meshwright.planning.layout import Layout
from meshwright.verification import verify as verifying
from meshwright.verification.problem import Problem

GRADIENT = "the gradient of the parameter embedding.weight, after the backward"
CUT, TP = replace(UNTIED, **CUTTABLE), Layout(dp_shard=2, tp=2)
CHECKPOINTED = {"techniques": {"activation_checkpointing": "full"}}
FAULTS = {
    # the optimizer step
    "stale_weights_after_a_step": (UNTIED, FSDP, {}, "the output of layers.0.attention_norm (forward) of step 2"),
    "moments_swapped": (UNTIED, FSDP, {}, "the optimizer's exp_avg of layers.1.attention.wk.weight after step 1"),
    "moments_of_the_first_shard": (UNTIED, FSDP, {}, "the optimizer's exp_avg_sq of head.weight after step 1"),
    "moments_in_bf16": (UNTIED, FSDP, {}, "the optimizer's exp_avg of embedding.weight after step 1"),
    "moments_forgotten": (UNTIED, FSDP, {}, "the optimizer's step of embedding.weight after step 1"),
    "weights_in_bf16": (UNTIED, FSDP, {}, "the parameter embedding.weight after step 1"),
    "decayed_twice_on_one_rank": (UNTIED, FSDP, {}, "the parameter embedding.weight after step 1"),
    "last_rank_does_not_step_at_the_end": (UNTIED, DDP, {}, "the parameter embedding.weight after step 2, on rank 1"),
    "state_of_one_rank_differs_at_the_end": (
        UNTIED,
        DDP,
        {},
        "the optimizer's exp_avg_sq of embedding.weight after step 2, on rank 1",
    ),
    "learning_rate_of_one_rank": (UNTIED, FSDP, {"steps": 3}, "the parameter embedding.weight after step 2"),
    "left_out_of_the_optimizer": (UNTIED, FSDP, {}, "the optimizer's step of norm.weight after step 1"),
    "gradients_not_cleared": (UNTIED, FSDP, {}, f"{GRADIENT} of step 2"),
    # clipping
    "replicas_counted_in_the_norm": (UNTIED, HSDP, {}, "the gradient norm of step 1"),
    "clipped_twice": (UNTIED, FSDP, {}, "the optimizer's exp_avg of embedding.weight after step 1"),
    # accumulation
    "first_microbatch_forgotten": (UNTIED, DDP, {"microbatch_rows": 2}, GRADIENT),
    "replicas_not_summed": (UNTIED, HSDP, {}, GRADIENT),
    "tied_gradient_lost": (TIED, FSDP, {}, GRADIENT),
    # the loss
    "loss_mask_shifted": (UNTIED, FSDP, {}, "the loss of step 1"),
    "ignored_labels_learnt": (UNTIED, FSDP, {}, "the loss of step 1"),
    "an_empty_microbatch_counts_as_one_token": (UNTIED, FSDP, {"microbatch_rows": 1}, "the loss of step 1"),
    # forward, backward, recomputation
    "sequences_gathered_in_another_order": (CUT, TP, {}, "the output of layers.0.attention.wo (forward)"),
    "rotary_tables_cached": (UNTIED, FSDP, {}, "the output of layers.0.attention.core (forward) of step 2"),
    "one_row_of_the_last_rank_attends_everywhere": (
        UNTIED,
        FSDP,
        {},
        "the output of layers.0.attention.core (forward), on rank 1",
    ),
    "recomputed_with_another_mask": (
        UNTIED,
        FSDP,
        CHECKPOINTED,
        "what the backward recomputes of layers.0.attention.core",
    ),
    "gradient_of_an_activation_doubled": (
        UNTIED,
        FSDP,
        {},
        "the gradient of layers.2.feed_forward_norm's output (backward)",
    ),
}
"""Fault -> the model, the layout and the circumstances in which it shows, and where it shows first."""

OF_RANDOM_NUMBERS = {"ranks_seeded_alike", "recomputed_with_other_random_numbers", "seeded_at_every_step"}
"""They show with dropout switched on: see test_random_numbers."""


@pytest.mark.kills("verify", "name")
@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_found_where_it_is(judged, name):
    model, layout, changes, where = FAULTS[name]
    problem = Problem(model, BATCHES, **{"steps": 2, "max_norm": 0.1, **changes})
    first = judged(problem, layout, name).first
    assert first is not None and first.place == where
    assert first.error > 1e4 * first.bound, "found by a hair"
    assert judged(problem, layout).first is None


def test_every_fault_is_tried():
    defined = {
        name
        for name, value in vars(faults).items()
        if getattr(value, "__module__", "") == faults.__name__ and name[0] != "_"
    }
    assert defined == set(FAULTS) | OF_RANDOM_NUMBERS


def clipping_twice(problem, layout, parallelize_fn):
    return broken.outcome("clipped_twice", problem, layout)


@pytest.mark.kills("verify", mutant="short gradients are clipped")
def test_clipping_is_compared_also_where_gradients_are_short(pool, monkeypatch):
    monkeypatch.setattr(verifying, "candidate", clipping_twice)
    report = verifying.verify(UNTIED, FSDP, BATCHES, steps=2, max_norm=100.0, dtypes=("float64",), pool=pool)
    assert "first differs at the optimizer's exp_avg of embedding.weight after step 1" in str(report)
    report = verifying.verify(UNTIED, FSDP, BATCHES, steps=2, max_norm=None, dtypes=("float64",), pool=pool)
    assert report, "nobody asked for clipping"


@pytest.mark.fast
def test_the_texts_that_faults_of_the_library_replace_stand_there_once():
    source = Path(meshwright.__file__).parent
    found = {fault.what: (source / fault.file).read_text(encoding="utf-8").count(fault.old) for fault in library.FAULTS}
    assert len(found) > 30 and {what: times for what, times in found.items() if times != 1} == {}
