"""Runs whose rate follows tokens and whose guard looks at losses: on other layouts and when resumed, the same ones."""

from __future__ import annotations

import random

import pytest
from e2e_runs import Job, assert_equal_checkpoints, losses, metrics

from meshwright.training.optim.schedules import learning_rate

STEPS, BAD = 12, 9
SCHEDULE_FREE = {"optimizer.kind": "schedule_free_adamw", "schedule.kind": "constant", "validation.every": 3}


@pytest.fixture
def guarded(small, corpus, tmp_path):
    """The tiny run with one step, number 9, on noise."""
    draw = random.Random(1)
    noise = tmp_path / "noise.txt"
    noise.write_text("".join(chr(draw.randrange(33, 126)) for _ in range(40_000)))
    parts = [
        {"name": "good", "source": (str(corpus),), "weight": 1.0},
        {"name": "noise", "source": (str(noise),), "weight": 0.0},
    ]
    weights = [{"from_step": BAD - 1, "weights": (0.0, 1.0)}, {"from_step": BAD, "weights": (1.0, 0.0)}]
    base = {key: value for key, value in small().items() if key != "data.source"}
    return base | {
        "data.mixture": parts,
        "data.curriculum": weights,
        "schedule.tokens": 2000,
        "schedule.warmup_tokens": 600,
        "optimizer.max_loss_deviation": 2.0,
        "optimizer.loss_window": 5,
        "checkpoint.every": STEPS,
    }


@pytest.mark.parametrize("changes", [{}, SCHEDULE_FREE], ids=("adamw", "schedule-free"))
def test_a_resumed_run_skips_the_same_step_and_has_the_same_rates(train, guarded, tmp_path, changes):
    config = {**guarded, **changes}
    whole = train(2, job=Job({**config, "steps": STEPS}))[0]
    rows = metrics(whole.folder)
    assert whole.status == 0 and [row["skipped"] for row in rows] == [0] * (BAD - 1) + [1] * (STEPS - BAD + 1)
    assert f"step {BAD} was skipped on all ranks: the loss" in whole.out
    kind = {"kind": config.get("schedule.kind", "cosine"), "warmup_steps": 600, "final_ratio": 0.1}
    wanted = [learning_rate(row["tokens"] - 1, peak=3e-3, total_steps=2000, by_tokens=True, **kind) for row in rows]
    assert [row["learning_rate"] for row in rows] == wanted
    parts = train(2, job=Job({**config, "steps": 7, "out": str(tmp_path / "parts")}))[0]
    again = train(2, {"steps": STEPS}, folder=parts.folder)[0]
    assert (again.status, f"step {BAD} was skipped" in again.out) == (0, True)
    step = f"checkpoints/step-{STEPS:08d}"
    assert_equal_checkpoints(whole.folder / step, again.folder / step)

    one = train(1, job=Job({**config, "steps": 7, "layout.dp_shard": 1, "out": str(tmp_path / "one")}))[0]
    other = train(2, {"steps": STEPS, "layout.dp_shard": 1, "layout.tp": 2}, folder=one.folder)[0]
    known = metrics(other.folder)
    for key in ("skipped", "tokens", "learning_rate"):
        assert [row[key] for row in known] == [row[key] for row in rows]
    assert losses(other.folder) == pytest.approx(losses(whole.folder), rel=1e-3)
    found, wanted = (
        {row["step"]: row["validation_loss"] for row in r if row["step"] != 7 and "validation_loss" in row}
        for r in (known, rows)
    )
    assert found == pytest.approx(wanted, rel=1e-3) and bool(found) == bool(changes)
