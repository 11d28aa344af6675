"""What a run does when it is told to stop, or loses a process. Real commands: signals are between processes."""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
from e2e_runs import (
    Ended,
    assert_equal_checkpoints,
    end,
    family,
    finish,
    free_port,
    losses,
    metrics,
    only_run,
    start,
    tree,
)

from meshwright.checkpoint.folder import CheckpointFolder
from meshwright.checkpoint.manifest import Manifest
from meshwright.training.health.heartbeat import FOLDER as HEARTBEATS
from meshwright.training.health.heartbeat import file_of, read_record, read_records
from meshwright.training.run.occupancy import latest_checkpoint

pytestmark = pytest.mark.all

ENDLESS = {"steps": 1_000_000, "checkpoint.every": 0, "schedule.kind": "constant", "schedule.warmup_steps": 0}


def wait_until(
    happens: Callable[[], Any], process: subprocess.Popen, seconds: float = 200.0, pause: float = 0.03
) -> Any:
    """Its value once it is true. Fails when the process ends first."""
    limit = time.monotonic() + seconds
    while time.monotonic() < limit:
        with contextlib.suppress(FileNotFoundError, ValueError):
            if value := happens():
                return value
        assert process.poll() is None, process.communicate()
        time.sleep(pause)
    raise AssertionError(f"did not happen within {seconds} s")


def is_open(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


class Command:
    """A training command that is under way, and all processes that it ever had."""

    def __init__(self, words, environment, cwd):
        self.process = start([sys.executable, "-m", "meshwright", "train", *words], environment, cwd)
        self.cwd = cwd
        self.seen: dict[int, psutil.Process] = {}

    def look(self) -> list[psutil.Process]:
        """Its descendants now: a resource tracker, the fork server, and the fork server's workers."""
        found = family(self.process)
        self.seen |= {child.pid: child for child in found}
        return found

    def workers(self) -> list[psutil.Process]:
        """The ranks: the fork server's children, and not the processes that write for them."""
        self.look()
        return [rank for server in psutil.Process(self.process.pid).children() for rank in server.children()]

    def steps_taken(self, runs: Path, more_than: int = 0) -> int:
        """Wait until the run has taken some steps."""
        return wait_until(lambda: (taken := len(metrics(only_run(runs)))) > more_than and taken, self.process)

    def wait_for(self, phase: str, heartbeats: str, rank: int = 0) -> None:
        """Wait until a rank says that it is in a phase; ``heartbeats`` is a pattern below the folder of the test."""

        def is_there() -> bool:
            found = [read_record(file_of(folder, rank)) for folder in self.cwd.glob(heartbeats)]
            return any(record is not None and record.phase == phase for record in found)

        wait_until(is_there, self.process, pause=0.001)

    def to_group(self, number: int) -> None:
        """As a terminal does on Ctrl-C: every process of the group gets it."""
        self.look()
        os.killpg(self.process.pid, number)

    def to_parent(self, number: int) -> None:
        self.look()
        os.kill(self.process.pid, number)

    def ended(self) -> Ended:
        """Its end; then nothing may be left of it."""
        done = finish(self.process)
        _, alive = psutil.wait_procs(list(self.seen.values()), timeout=30)
        left = [child for child in alive if child.is_running() and child.status() != psutil.STATUS_ZOMBIE]
        end(left)
        assert not left, left
        return done


@pytest.fixture
def begin(environment, tmp_path):
    """``begin(*flags)``: start ``meshwright train`` with them. It ends with the test, and leaves no temporary files."""
    started = []

    def run(*words) -> Command:
        started.append(Command(words, environment, tmp_path))
        return started[-1]

    yield run
    for command in started:
        if command.process.poll() is None:
            end([*command.look(), psutil.Process(command.process.pid)])
    assert not list((tmp_path / "tmp").glob("meshwright-*"))


def assert_stopped_cleanly(done: Ended, number: int, run: Path) -> int:
    """All ranks stopped at one step, it was saved whole, and how to go on is said. Returns the step."""
    assert (done.status, done.err) == (128 + number, "")
    latest = CheckpointFolder(run / "checkpoints").latest()
    assert latest is not None
    state = Manifest.read(latest).extra["state"]
    rows = metrics(run)
    assert [row["step"] for row in rows] == list(range(1, state["step"] + 1)) and state["consumed"] == 8 * state["step"]
    assert latest.name == f"step-{state['step']:08d}" and f"saved {latest.relative_to(run.parent.parent)}" in done.out
    name = signal.Signals(number).name
    way = rf"\S*python\S* -m meshwright train {run.relative_to(run.parent.parent)}\n"
    assert re.search(rf"stopped by {name}, saved\. Continue with: {way}", done.out)
    return state["step"]


@pytest.mark.parametrize("asynchronous", [False, True], ids=["waited-for", "beside"])
def test_interrupt_terminate_and_user_signal_each_save_and_the_run_goes_on(begin, flags, tmp_path, train, asynchronous):
    endless = ENDLESS | {"techniques.precision.master": "float64", "checkpoint.asynchronous": asynchronous}
    command = begin(*flags(endless | {"out": "runs", "process.count": 4}))
    command.steps_taken(tmp_path / "runs")
    run = only_run(tmp_path / "runs")
    command.wait_for("forward", f"runs/{run.name}/heartbeats", rank=2)
    command.to_group(signal.SIGINT)
    taken = assert_stopped_cleanly(command.ended(), signal.SIGINT, run)

    copies = {
        number: shutil.copytree(run, tmp_path / number.name / run.name) for number in (signal.SIGTERM, signal.SIGUSR1)
    }
    moments = {signal.SIGTERM: ("save", "--checkpoint.every=1"), signal.SIGUSR1: ("validation", "--validation.every=1")}
    commands = {
        number: begin(str(copy.relative_to(tmp_path)), "--process.count=2", moments[number][1])
        for number, copy in copies.items()
    }
    for number, copy in copies.items():
        commands[number].steps_taken(copy.parent, taken)
        commands[number].wait_for(moments[number][0], str(copy.relative_to(tmp_path) / "heartbeats"))
        commands[number].to_parent(number)
    further = {
        number: assert_stopped_cleanly(commands[number].ended(), number, copy) for number, copy in copies.items()
    }
    assert min(further.values()) > taken

    straight = train(2, endless | {"steps": max(further.values())})[0]
    for number, copy in copies.items():
        assert losses(copy) == pytest.approx(losses(straight.folder)[: further[number]], rel=1e-7)


def test_a_signal_to_every_process_or_to_one_worker_saves_too(begin, flags, tmp_path):
    """As ``timeout``, systemd and PBS send TERM, and a terminal that closes sends HUP: the fork server gets it as
    well.
    """
    cases = [("group", signal.SIGTERM), ("group", signal.SIGHUP), ("worker", signal.SIGTERM)]
    commands = [begin(*flags(ENDLESS | {"out": f"runs{n}", "process.count": 2})) for n in range(len(cases))]
    for place, (command, (to, number)) in enumerate(zip(commands, cases, strict=True)):
        command.steps_taken(tmp_path / f"runs{place}")
        command.to_group(number) if to == "group" else command.workers()[0].send_signal(number)
    for place, (command, (_, number)) in enumerate(zip(commands, cases, strict=True)):
        assert_stopped_cleanly(command.ended(), number, only_run(tmp_path / f"runs{place}"))


def test_a_signal_while_starting_ends_at_once_without_a_trace(begin, flags, tmp_path):
    (tmp_path / "large.txt").write_text("a text that takes a while to read\n" * 1_500_000)
    large = {"data.source": [str(tmp_path / "large.txt")], "data.cache": str(tmp_path / "cache")}
    moments = {
        "importing": lambda command: len(command.look()) >= 2,
        "forking": lambda command: len(command.workers()) == 2,
    }
    cases = [
        ("importing", signal.SIGINT),
        ("forking", signal.SIGINT),
        ("forking", signal.SIGTERM),
        ("data", signal.SIGTERM),
    ]
    base = ENDLESS | {"process.count": 2}
    started = [
        begin(*flags(base | {"out": f"runs{n}"} | (large if moment == "data" else {})))
        for n, (moment, _) in enumerate(cases)
    ]
    for command, (moment, number) in zip(started, cases, strict=True):
        if moment == "data":
            command.wait_for("data", "tmp/meshwright-*/heartbeats")
        else:
            wait_until(lambda: moments[moment](command), command.process)  # noqa: B023
        command.to_group(number) if number == signal.SIGINT else command.to_parent(number)
    for place, (command, (_, number)) in enumerate(zip(started, cases, strict=True)):
        done, runs = command.ended(), tmp_path / f"runs{place}"
        assert done.status == 128 + number
        if "saved" in done.out:  # the machine was slow to send it, and the run had begun
            assert_stopped_cleanly(done, number, only_run(runs))
        else:
            assert "meshwright: " in done.err or "before the first step" in done.out, done
            assert not runs.exists()


def test_a_rank_that_waits_for_the_others_ends_at_once(environment, flags, tmp_path):
    port = free_port()
    task = {"SLURM_JOB_ID": str(port - 20_000), "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NTASKS": "2"}
    words = [sys.executable, "-m", "meshwright", "train", *flags({"out": "runs"})]
    process = start(words, environment | task | {"SLURM_STEP_NODELIST": "127.0.0.1"}, tmp_path)
    wait_until(lambda: is_open(port), process)
    process.terminate()
    assert finish(process).status == -signal.SIGTERM
    assert not (tmp_path / "runs").exists()


def test_ctrl_c_twice_ends_at_once_and_the_run_can_be_continued(begin, flags, tmp_path, train):
    command = begin(*flags(ENDLESS | {"out": "runs", "process.count": 2, "checkpoint.every": 1}))
    command.steps_taken(tmp_path / "runs", more_than=2)
    command.to_group(signal.SIGINT)
    time.sleep(0.03)
    command.to_group(signal.SIGINT)
    done = command.ended()
    assert done.status == 130 and "Traceback" not in done.err
    run = only_run(tmp_path / "runs")
    latest = CheckpointFolder(run / "checkpoints").latest()
    assert latest is not None
    step = Manifest.read(latest).extra["state"]["step"]
    again = train(2, {"steps": step + 1}, folder=run)[0]
    assert again.status == 0 and [row["step"] for row in metrics(run)] == list(range(1, step + 2))


@pytest.mark.parametrize(
    ("layout", "part"),
    [({}, ""), ({"layout.pp": 2, "layout.dp_shard": 1}, r", stage [01] of 2: layers\.\d( to layers\.\d)?")],
    ids=["dp_shard", "pp"],
)
def test_a_killed_worker_ends_the_run_with_its_rank_and_its_part_of_the_model(begin, flags, tmp_path, layout, part):
    command = begin(*flags(ENDLESS | layout | {"out": "runs", "process.count": 2, "checkpoint.every": 2}))
    command.steps_taken(tmp_path / "runs", more_than=5)  # then the save of step 2 is whole
    victim = max(command.workers(), key=lambda child: child.pid)
    begun = time.monotonic()
    victim.kill()
    done = command.ended()
    assert time.monotonic() - begun < 30
    said = (
        rf"meshwright: rank [01] \(host {os.uname().nodename}, pid {victim.pid}{part}\) was killed by SIGKILL at"
        rf" step \d+, in \w+.*; the"
    )
    assert done.status == 1 and re.match(said, done.err) and len(done.err.splitlines()) == 1, done.err
    run = only_run(tmp_path / "runs")
    before = tree(run)
    assert CheckpointFolder(run / "checkpoints").latest() is not None and tree(run) == before


def test_the_command_of_a_killed_ranks_message_ends_the_run_as_if_nothing_had_happened(
    begin, spmd, flags, tmp_path, environment, train
):
    steady = {"schedule.kind": "constant", "schedule.warmup_steps": 0, "checkpoint.every": 2}
    command = begin(*flags(ENDLESS | steady | {"out": "killed", "process.count": 2}))
    folder = wait_until(lambda: _saved(tmp_path / "killed"), command.process)
    victim = read_records(folder / HEARTBEATS)[1]
    assert victim.pid in {child.pid for child in command.workers()}
    os.kill(victim.pid, signal.SIGKILL)
    done = command.ended()
    said, way, words = done.err.strip().rpartition(" Continue with: ")
    assert done.status == 1 and way and f"pid {victim.pid}" in said and "was killed by SIGKILL" in said, done.err
    steps = int(latest_checkpoint(folder).removeprefix("step-")) + 5
    again = finish(start([*shlex.split(words), f"--steps={steps}"], environment, tmp_path))
    assert again.status == 0 and "continuing from" in again.out, again.err
    straight = train(2, steady | {"steps": steps, "checkpoint.every": 0})[0].folder
    whole = f"checkpoints/step-{steps:08d}"
    spmd(1, assert_equal_checkpoints, straight / whole, folder / whole)


def _saved(runs: Path) -> Path | None:
    """The folder of the run once it has a checkpoint and its ranks' heartbeats."""
    folder = next(runs.iterdir(), None) if runs.is_dir() else None
    ready = folder is not None and latest_checkpoint(folder) and len(read_records(folder / HEARTBEATS)) == 2
    return folder if ready else None
