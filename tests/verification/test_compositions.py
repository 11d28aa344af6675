"""Somebody else's compositions: sound ones are called equal, and in broken ones the right place is named."""

from __future__ import annotations

import statistics

import pytest
import torch
from support import composed
from test_verify import DDP, even

from meshwright.core.errors import UnsupportedError
from meshwright.planning.layout import Layout
from meshwright.verification.problem import RandomBatches
from meshwright.verification.verify import verify

TP = Layout(dp_shard=1, tp=2)
RANDOM = RandomBatches(257, rows=4, seq_len=10)


def halves(step: int):
    """The first token sends a row to an expert: each rank has rows for one of the two."""
    batch = even(step)
    batch["tokens"][:, 0] = batch["tokens"][:, 0] % 128 + torch.tensor([0, 0, 128, 128])
    return batch


SOUND = {
    "tensor_parallel": (composed.HEADS, TP, RANDOM),
    "tensor_parallel_with_hooks": (composed.HEADS, TP, RANDOM),
    "tensor_and_data_parallel": (composed.HEADS, Layout(dp_replicate=2, dp_shard=1, tp=2), even),
    "vocabulary_parallel": (composed.HEADS, TP, RANDOM),
    "partial_outputs": (composed.Dropping, TP, even),
    "by_hand": (composed.Routed, DDP, halves),
    "torchs_ddp": (composed.Rotary, DDP, even),
    "reentrant": (composed.Dropping, DDP, even),
}
"""Composition -> model, layout, batches."""

BROKEN = {
    "tensor_parallel_without_the_norms_sum": (
        composed.HEADS,
        TP,
        RANDOM,
        "the gradient of the parameter layers.0.attention.q_norm.weight, after the backward",
    ),
    "vocabulary_parallel_without_a_mask": (composed.HEADS, TP, RANDOM, "the output of embedding (forward)"),
    "by_hand_where_there_is_one": (
        composed.Routed,
        DDP,
        halves,
        "the gradient of the parameter experts.1.weight, after the backward, on rank 0",
    ),
    "without_buffers": (composed.Rotary, DDP, even, "the initial value of the buffer inv_freq"),
    "torchs_ddp": (composed.Scaled, DDP, even, "the buffer running after the forward of step 1, on rank 1"),
}
"""Composition -> the same, and where it first shows."""


@pytest.mark.all
@pytest.mark.parametrize("name", SOUND)
def test_a_sound_composition_is_called_equal(pool, name):
    model, layout, batches = SOUND[name]
    report = verify(model, layout, batches, parallelize_fn=getattr(composed, name), steps=2, pool=pool)
    assert report, report
    notes = report.comparisons[0].notes
    if name.startswith("tensor_"):
        assert notes == (
            "16 modules have their outputs shared out or never whole: only what comes of them was compared",
        )
        compared = {d.name for d in report.comparisons[0].differences if d.stage == "forward"}
        assert {
            "layers.0.attention.wo",
            "layers.1.feed_forward",
            "head",
        } <= compared and "layers.0.attention.wq" not in compared
        bounds = [d.bound for d in report.comparisons[1].differences if d.stage == "gradient"]
        assert statistics.median(bounds) < 1e-5, "bounds that wide catch nothing"
    elif name == "reentrant":
        stages = {d.stage for d in report.comparisons[0].differences if d.name == "blocks.0.inner"}
        assert stages == {"forward", "backward", "recomputed"} and not notes
    elif name == "partial_outputs":
        compared = {d.name for d in report.comparisons[0].differences if d.stage == "forward"}
        assert "blocks.0.outer" in compared and "blocks.0.inner" not in compared
    else:
        assert not notes


@pytest.mark.kills("others", "name")
@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_composition_is_found_where_it_is(pool, name):
    model, layout, batches, where = BROKEN[name]
    report = verify(
        model, layout, batches, parallelize_fn=getattr(composed, name), steps=2, dtypes=("float64",), pool=pool
    )
    first = report.comparisons[0].first
    assert first is not None and first.place == where, report
    assert first.error > 1e4 * first.bound, "found by a hair"


def test_a_layout_of_ours_is_refused_where_ranks_would_keep_statistics_of_their_own_rows(pool):
    with pytest.raises(UnsupportedError, match="a forward of Scaled keeps state that depends on its rows: running"):
        verify(composed.Scaled, DDP, even, steps=2, dtypes=("float64",), pool=pool)
