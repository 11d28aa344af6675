"""Runs whose rate follows tokens and whose guard looks at losses: on other layouts and when resumed, the same ones."""

from __future__ import annotations

import random
import re
import shutil

import pytest
from e2e_runs import Job, assert_equal_checkpoints, losses, metrics

from meshwright.training.optimizer import LearningRateSchedule

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


@pytest.mark.all
@pytest.mark.parametrize("changes", [{}, SCHEDULE_FREE], ids=("adamw", "schedule-free"))
def test_a_resumed_run_skips_the_same_step_and_has_the_same_rates(train, guarded, tmp_path, changes):
    config = {**guarded, **changes}
    whole = train(2, job=Job({**config, "steps": STEPS}))[0]
    rows = metrics(whole.folder)
    assert whole.status == 0 and [row["skipped"] for row in rows] == [0] * (BAD - 1) + [1] * (STEPS - BAD + 1)
    assert f"step {BAD} was skipped on all ranks: the loss" in whole.out
    kind = {"kind": config.get("schedule.kind", "cosine"), "warmup_steps": 600, "final_ratio": 0.1}
    wanted = [LearningRateSchedule(3e-3, 2000, by_tokens=True, **kind)(row["tokens"] - 1) for row in rows]
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


@pytest.mark.follows("optimizer.lr = …")
@pytest.mark.parametrize(
    ("before", "changes", "keys"),
    [
        ({"schedule.kind": "cosine"}, {"steps": 12}, "steps 6 → 12"),
        ({"schedule.kind": "linear"}, {"steps": 30}, "steps 6 → 30"),
        ({"schedule.kind": "constant"}, {"steps": 9, "optimizer.lr": 0.01}, "steps 6 → 9, optimizer.lr 0.003 → 0.01"),
        ({"steps": 3}, {"steps": 9, "schedule.warmup_steps": 7}, "steps 3 → 9, schedule.warmup_steps 0 → 7"),
        (
            {"schedule.kind": "wsd"},
            {"steps": 9, "schedule.kind": "linear"},
            'steps 6 → 9, schedule.kind "wsd" → "linear"',
        ),
    ],
    ids=("cosine", "linear", "peak", "warmup", "kind"),
)
def test_a_rate_that_jumps_is_said_with_the_rate_that_avoids_it(train, tmp_path, before, changes, keys):
    first = train(1, before)[0].folder
    for name in ("copy", "flat"):
        shutil.copytree(first, tmp_path / name)
    jumped = train(1, changes, folder=first)[0]
    step, found = len(metrics(tmp_path / "copy")) + 1, metrics(first)
    note = re.search(r"note: the learning rate jumps: (.*)", jumped.out)
    assert note, jumped.out
    rate, was = found[step - 1]["learning_rate"], found[step - 2]["learning_rate"]  # a finished schedule keeps its end
    assert note[1].startswith(f"step {step} has {rate:.2e}, where the schedule before had {was:.2e} ({keys}); ")
    peak = re.search(r"to go on at that rate, set optimizer.lr = (\S+)", note[1])
    assert peak
    again = train(1, changes | {"optimizer.lr": peak[1]}, folder=tmp_path / "copy")[0]
    assert "rate jumps" not in again.out
    assert metrics(tmp_path / "copy")[step - 1]["learning_rate"] == pytest.approx(was, rel=1e-4)
    if flat := re.search(r"or schedule.kind = constant beside optimizer.lr = (\S+)", note[1]):
        flat = changes | {"schedule.kind": "constant", "optimizer.lr": flat[1]}
        assert "rate jumps" not in train(1, flat, folder=tmp_path / "flat")[0].out
        assert metrics(tmp_path / "flat")[step - 1]["learning_rate"] == pytest.approx(was, rel=1e-4)


@pytest.mark.parametrize("kind", ["constant", "inverse_sqrt"])
def test_a_rate_that_goes_on_as_it_was_needs_no_word(train, kind):
    first = train(1, {"schedule.kind": kind, "schedule.warmup_steps": 2, "steps": 3})[0]
    assert "rate jumps" not in train(1, {"steps": 6, "layout.dp_shard": 1}, folder=first.folder)[0].out
