"""A rank that is stopped, killed, or computes nonsense: the others hear of it in time, and the run goes on or ends in
words.
"""

from __future__ import annotations

import json
import math
import os
import signal
import sys
import time
from pathlib import Path

import psutil
import pytest
from e2e_runs import Job, Result, end, family, finish, losses, metrics, only_run, start
from test_signals import ENDLESS, wait_until

from meshwright.checkpoint.folder import CheckpointFolder
from meshwright.distributed.process.workers import WorkerFailed
from meshwright.distributed.step.whole_model import WholeModel
from meshwright.training.health.heartbeat import Heartbeat, file_of, read_record
from meshwright.training.health.peers import RankStalled
from meshwright.training.trainer import Trainer


class AtStep(Job):
    """A run in which one rank does something in the forward of a step."""

    def __init__(self, changes: dict, rank: int, step: int, what: str):
        super().__init__(changes)
        self.rank, self.step, self.what = rank, step, what

    def __call__(self) -> Result:
        forward, taken = WholeModel._loss_sum, 0

        def disturbed(model, piece):
            nonlocal taken
            taken += 1
            loss = forward(model, piece)
            if taken == self.step and int(os.environ["RANK"]) == self.rank:
                if self.what == "nan":
                    return loss * math.nan
                if self.what == "sleep":
                    time.sleep(600)
                os.kill(os.getpid(), signal.SIGSTOP)
            return loss

        WholeModel._loss_sum = disturbed  # pyright: ignore[reportAttributeAccessIssue]
        try:
            return super().__call__() if self.what == "nan" else Result(Trainer(self.config()).run(), "")
        finally:
            WholeModel._loss_sum = forward


@pytest.mark.all
def test_a_step_that_is_not_finite_on_one_rank_is_skipped_on_all(train, small):
    straight = train(2, {"steps": 4})[0].folder
    results = train(2, job=AtStep(small({"steps": 4}), 1, 3, "nan"))
    run = results[0].folder
    rows = metrics(run)
    assert (
        [row["skipped"] for row in rows] == [0, 0, 1, 1]
        and math.isnan(rows[2]["loss"])
        and math.isfinite(rows[3]["loss"])
    )
    assert losses(run)[:2] == losses(straight)[:2] and losses(run)[3] != losses(straight)[3]
    assert [row["samples"] for row in rows] == [8, 16, 24, 32], "the samples of the skipped step are not taken again"
    assert CheckpointFolder(run / "checkpoints").latest() == run / "checkpoints/step-00000004"


@pytest.mark.all
@pytest.mark.parametrize(
    ("what", "says"),
    [
        ("stop", "whose process is stopped (state T: a SIGSTOP, or a debugger)"),
        ("sleep", "which runs but does not come"),
    ],
)
def test_a_rank_that_does_not_go_on_is_named_and_its_stack_is_kept(spmd, small, tmp_path, what, says):
    changes = small({"steps": 20, "process.step_timeout_sec": 4, "out": str(tmp_path / "runs")})
    begun = time.monotonic()
    with pytest.raises(WorkerFailed) as caught:
        spmd(2, AtStep(changes, 1, 5, what), timeout=40)
    assert time.monotonic() - begun < 15
    error = caught.value.error
    run = only_run(tmp_path / "runs")
    assert isinstance(error, RankStalled), caught.value
    words = str(error)
    assert words.startswith("rank 0 has waited for ") and "of group world (ranks 0 and 1), at step 5, in " in words, (
        words
    )
    assert (
        f"for rank 1 (host {os.uname().nodename}, pid " in words and says in words and "at step 5, in forward" in words
    ), words
    stacks = run / "stalled-rank1-step5.txt"
    assert words.endswith(f"Stacks: {stacks}. The limit is process.step_timeout_sec = 4.")
    text = stacks.read_text()
    assert text.index("rank 1 (host") < text.index("rank 0 (host", len(words) - 200) and "in forward_backward" in text
    if what == "sleep":
        assert "time.sleep(600)" in text.split("\nrank 0 (host")[0], "the line where it sits"


ELASTIC = [
    "-m",
    "torch.distributed.run",
    "--standalone",
    "--nproc-per-node",
    "2",
    "--monitor-interval",
    "0.1",
    "--max-restarts",
    "1",
]


@pytest.mark.all
@pytest.mark.parametrize(
    ("saves", "every"),
    [({"checkpoint.every": 3}, 3), ({"checkpoint.every": 0, "checkpoint.memory_every": 2}, 2)],
    ids=["disk", "memory"],
)
def test_torchrun_restarts_find_the_run_again_and_survivors_say_who_was_lost(
    environment, flags, tmp_path, saves, every
):
    (tmp_path / "ram").mkdir()
    if "checkpoint.memory_every" in saves:
        saves = saves | {"checkpoint.memory_folder": tmp_path / "ram"}
    words = flags(ENDLESS | saves | {"out": "runs"})
    process = start([sys.executable, *ELASTIC, "-m", "meshwright", "train", *words], environment, tmp_path)
    try:
        run = wait_until(lambda: len(metrics(only_run(tmp_path / "runs"))) > 7 and only_run(tmp_path / "runs"), process)
        record = wait_until(lambda: read_record(file_of(run / "heartbeats", 1)), process)
        os.kill(record.pid, signal.SIGKILL)
        resumed = wait_until(lambda: [line for line in lines(run) if line.get("event") == "resume"], process)
        after = wait_until(
            lambda: [line for line in lines(run) if line["time"] > resumed[0]["time"] and "loss" in line], process
        )
        assert after[0]["step"] == resumed[0]["step"] + 1
        assert resumed[0]["step"] % every == 0
    finally:
        process.terminate()
        done = finish(process)
        end(family(process))
    assert only_run(tmp_path / "runs") == run and "stopped by SIGTERM, saved" in done.out
    said = f"meshwright: rank 1 (host {record.host}, pid {record.pid}) ended without a word at step "
    assert said in done.err and "; rank 0 was at step " in done.err, done.err
    assert not list((tmp_path / "tmp").glob("meshwright-*"))
    assert not [file for file in (tmp_path / "ram").rglob("*") if file.is_file()], "the last state is on disk"


def lines(run: Path) -> list[dict]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def test_a_heartbeat_costs_microseconds_and_a_disk_that_fails_does_not_matter(tmp_path):
    with Heartbeat() as beat:
        beat.settle(tmp_path / "beats")
        beat.enter("forward", 7)
        record = read_record(file_of(tmp_path / "beats", beat.rank))
        assert record is not None and (record.step, record.phase, record.pid) == (7, "forward", os.getpid())
        assert record.stack[-1][2] == "look" and "test_a_heartbeat_costs" in record.stack[-3][2]
        processor = psutil.Process().cpu_times()
        for _ in range(1000):
            beat.enter("data", 8)
            beat.enter("forward")
            beat.enter("step")
        spent = sum(psutil.Process().cpu_times()[:2]) - sum(processor[:2])
        assert spent / 1000 < 500e-6, "a thousandth of a step of half a second, even on a busy machine"
        beat.settle(Path("/proc/no/such/place"))
        beat.enter("save", 8)
        beat.look()
        assert beat.folder != Path("/proc/no/such/place") and not (tmp_path / "beats").exists()
