"""A run in hard weather: ranks, writers and the launcher killed, signals and a disk that fails, at random moments.

Continued each time, on 4, 2 or 1 ranks.

    python benchmarks/chaos.py [events] [--seed 0] [--folder DIR] [--synchronous]

At the end every step's loss and samples must be those of a run that nothing happened to. On the way, after every
event: what ``latest`` names is whole, it is no older than before, and the run goes on from it; after a signal no step
is lost.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from meshwright.checkpoint import writer
from meshwright.checkpoint.copying import verify
from meshwright.checkpoint.folder import CheckpointFolder
from meshwright.checkpoint.manifest import Manifest
from meshwright.training import launch
from meshwright.training.health.heartbeat import file_of, read_record
from meshwright.training.metrics import read_metrics

HERE = Path(__file__).resolve().parent
SAVE_EVERY, BATCH, TOLERANCE = 5, 8, 1e-7
RATE = 3e-5
"""Small, so that losses stay comparable when the number of ranks changes: at 1e-3 a difference of one rounding
doubles every twenty steps. A step that is lost or taken twice still changes all later losses by far more than the
tolerance.
"""
MOMENTS = ("process group", "data", "model", "checkpoint", "forward", "forward", "step", "save", "save", "validation")
WORDS = (
    "the a mesh axis rank loss step shard wright plan token batch layer model data of and to in is not every one sum"
).split()
FAULT = "MESHWRIGHT_CHAOS_FAULT"


@dataclass(frozen=True)
class Event:
    """``kind``: kill (a rank), writer or launcher (killed), disk, or the name of a signal.

    ``moment``: the phase that ``rank`` shall be in. ``change``: of the disk.
    """

    kind: str
    moment: str = "forward"
    rank: int = 0
    change: int = 1


@dataclass
class Figures:
    events: Counter[str] = field(default_factory=Counter)
    lost: list[int] = field(default_factory=list)
    recovery: list[float] = field(default_factory=list)
    commands: int = 0
    steps: int = 0
    deviation: float = 0.0

    def text(self) -> str:
        kinds = ", ".join(f"{n} {kind}" for kind, n in sorted(self.events.items()))
        recovery = (
            f"{max(self.recovery):.1f} s at most, {sum(self.recovery) / len(self.recovery):.1f} s on average"
            if self.recovery
            else "-"
        )
        return "\n".join(
            [
                f"events                       {sum(n for kind, n in self.events.items() if ',' not in kind)}"
                f" ({kinds})",
                f"commands                     {self.commands}",
                f"steps                        {self.steps}",
                f"steps taken again            {sum(self.lost)} ({max(self.lost, default=0)} at most; a save every"
                f" {SAVE_EVERY})",
                f"from a kill to the next step {recovery} ({len(self.recovery)} restarts by the launcher)",
                "lost beyond the last save    0",
                "half loaded                  0",
                f"losses, largest deviation    {self.deviation:.1e}",
            ]
        )


class Weather:
    """The run in ``folder``/run and what happens to it.

    Every expectation that fails is an AssertionError that says which.
    """

    def __init__(self, folder: Path, seed: int = 0, say: Callable[[str], None] = print, *, asynchronous: bool = True):
        self.folder, self.run, self.say, self.asynchronous = folder, folder / "run", say, asynchronous
        self.most_lost = SAVE_EVERY * (1 + asynchronous)
        """Steps that may be taken again: of one interval, and while its save is under way."""
        self.fired = folder / "fired"
        """There as soon as the disk has failed."""
        self.step_at_fault: int | None = None
        """The last step when that was first seen."""
        self.draw = random.Random(seed)
        self.figures = Figures()
        text = random.Random(0)
        (folder / "texts").mkdir(parents=True)
        (folder / "tmp").mkdir()
        for name, words in (("a.txt", 6000), ("held.txt", 1500)):
            (folder / "texts" / name).write_text(" ".join(text.choices(WORDS, k=words)))

    # --- the run

    def command(self, ranks: int, steps: int, run: Path, *, restarts: int = 0, fault: str = "") -> subprocess.Popen:
        """Start the command; what it says goes to files."""
        flags: dict[str, Any] = {
            "run": run, "steps": steps, "model.size": "debug",
            "data.source": self.folder / "texts", "data.cache": self.folder / "cache",
            "data.seq_len": 32, "batch.global_batch": BATCH, "optimizer.lr": RATE,
            "schedule.kind": "constant", "schedule.warmup_steps": 0,
            "techniques.precision.master": "float64", "validation.every": 7, "validation.samples": 16,
            "checkpoint.every": SAVE_EVERY, "checkpoint.asynchronous": str(self.asynchronous).lower(),
            "logging.tensorboard": "off", "sample.tokens": 0, "process.count": ranks, "process.max_restarts": restarts,
        }  # fmt: skip
        words = ["train", *(f"--{key}={value}" for key, value in flags.items())]
        paths = [str(HERE), str(HERE.parent / "tests"), os.environ.get("PYTHONPATH", "")]
        known = {
            key: value
            for key, value in os.environ.items()
            if not key.startswith(("SLURM_", "TORCHELASTIC_", "MESHWRIGHT_"))
        }
        env = known | {
            "TMPDIR": str(self.folder / "tmp"),
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": os.pathsep.join(filter(None, paths)),
            FAULT: fault,
        }
        code = "import sys, chaos; sys.exit(chaos.faulty_command(sys.argv[1:]))"
        self.figures.commands += 1
        with open(run.with_suffix(".out"), "w") as out, open(run.with_suffix(".err"), "w") as err:
            return subprocess.Popen(
                [sys.executable, "-c", code, *words], env=env, stdout=out, stderr=err, start_new_session=True
            )

    def said(self) -> str:
        return self.run.with_suffix(".err").read_text()

    def latest(self) -> int:
        """The step of the newest whole checkpoint, 0 where there is none; its files are what its manifest says."""
        path = CheckpointFolder(self.run / "checkpoints").latest()
        if path is None:
            return 0
        manifest = Manifest.read(path)
        wrong = verify(path)
        state = manifest.extra["state"]
        assert not wrong and state["consumed"] == BATCH * state["step"], (wrong, state)
        return state["step"]

    def rows(self) -> list[dict[str, Any]]:
        path = self.run / "metrics.jsonl"
        return [json.loads(line) for line in path.read_text().split("\n")[:-1] if line] if path.exists() else []

    def steps(self) -> int:
        """The last step of which figures were written."""
        return next((row["step"] for row in reversed(self.rows()) if "loss" in row), 0)

    # --- what happens

    def happen(self, events: Sequence[Event]) -> None:
        """Let the events happen, each command suffering as many as it can survive."""
        pending = list(events)
        while pending:
            together = [pending.pop(0)]
            while (
                together[-1].kind in ("kill", "writer") and pending and pending[0].kind != "disk" and len(together) < 4
            ):
                together.append(pending.pop(0))
            self.suffer(together)

    def suffer(self, events: Sequence[Event]) -> None:
        """One command; of its events all but the last are kills of ranks, after which the launcher starts new ones, or
        of writers, after which the run goes on.
        """
        ranks = self.draw.choice((4, 4, 2, 1)) if events[-1].kind != "disk" else 2
        disk = events[-1] if events[-1].kind == "disk" else None
        self.fired.unlink(missing_ok=True)
        self.step_at_fault = None
        fault = f"{disk.rank % ranks}:{disk.change}:{self.fired}" if disk else ""
        process = self.command(
            ranks, 1_000_000, self.run, restarts=max(len(events) - 1, 1 if ranks == 1 else 0), fault=fault
        )
        for number, event in enumerate(events):
            self.figures.events["signal" if event.kind.startswith("SIG") else event.kind] += 1
            self.strike(process, event, event.rank % ranks, is_last=number == len(events) - 1)
        if process.poll() is None:  # one rank alone may have been given another life
            process.terminate()
            process.wait(60)

    def strike(self, process: subprocess.Popen, event: Event, rank: int, *, is_last: bool) -> None:
        before, said = self.latest(), self.said().count("restart ")
        if event.kind != "disk":
            pid = self.wait_for(process, event.moment, rank)
            family = psutil.Process(process.pid).children(recursive=True)
            if event.kind == "SIGINT" and event.rank % 2:  # a terminal's Ctrl-C reaches every process
                os.killpg(process.pid, signal.SIGINT)
            elif event.kind == "writer":
                return self.goes_on_without(process, pid)
            elif event.kind == "kill":
                os.kill(pid, signal.SIGKILL)
            else:
                os.kill(process.pid, signal.SIGKILL if event.kind == "launcher" else signal.Signals[event.kind])
            if event.kind == "launcher":
                _, left = psutil.wait_procs(family, timeout=30)
                assert not [one for one in left if one.status() != psutil.STATUS_ZOMBIE], "processes stay"
                for place in (self.folder / "tmp").glob("meshwright-*"):
                    shutil.rmtree(place)
        struck = time.time()
        restarted = False
        while process.poll() is None and not restarted:
            if event.kind == "disk" and self.is_unnoticed():
                self.figures.events["disk, and went on"] += 1  # a save beside training, or the removal of an old one
                event = Event("SIGTERM")
                process.terminate()
                process.wait(60)
            assert time.time() - struck < 120, f"{event} did not end the command"
            restarted = self.said().count("restart ") > said
            time.sleep(0.005)
        taken, latest = self.steps(), self.latest()
        assert latest >= before, f"{event}: the last save was step {before}, and now it is {latest}"
        self.figures.lost.append(max(0, taken - latest))
        self.say(
            f"{event.kind:<8} {event.moment:<14} rank {rank}  step {taken}, saved"
            f" {latest}{', restarted' if restarted else ''}"
        )
        assert taken - latest <= self.most_lost, f"{event}: {taken - latest} steps to take again"
        if restarted:
            self.figures.recovery.append(self.goes_on(process, struck, latest))
        else:
            self.check_end(event, process.returncode, taken - latest)

    def goes_on_without(self, process: subprocess.Popen, pid: int) -> None:
        """Kill the process that writes for a rank, if there is one yet, and see the next saves get whole."""
        for child in psutil.Process(pid).children():
            child.kill()
        before, begun = self.latest(), time.time()
        while self.latest() < before + 2 * SAVE_EVERY:
            assert process.poll() is None and time.time() - begun < 120, f"no save after {before}: {self.said()}"
            time.sleep(0.05)
        self.say(f"writer of a rank killed, saved {before}, later {self.latest()}")

    def is_unnoticed(self) -> bool:
        """The disk failed, and the run went past two saves since: the first may have begun before, and a run that ends
        by it, as one that waits for saves, ends at one.
        """
        if not self.fired.exists():
            return False
        if self.step_at_fault is None:
            self.step_at_fault = self.steps()
        return self.steps() > self.step_at_fault + 2 * SAVE_EVERY

    def wait_for(self, process: subprocess.Popen, moment: str, rank: int) -> int:
        """Wait for a phase of a rank, or for some seconds at most; returns the rank's process."""
        begun, pid = time.time(), 0
        places = [self.run / "heartbeats"]
        while True:
            found = [
                read_record(file_of(place, rank))
                for place in [*places, *(self.folder / "tmp").glob("meshwright-*/heartbeats")]
            ]
            for record in found:
                if record is not None and is_child(record.pid, process.pid):
                    begun, pid = (begun if pid else time.time()), record.pid
                    if record.phase == moment or time.time() - begun > 8:
                        return pid
            assert process.poll() is None, f"ended before {moment}: {self.said()}"
            assert time.time() - begun < 120, f"no heartbeat of rank {rank}"
            time.sleep(0.001)

    def goes_on(self, process: subprocess.Popen, struck: float, latest: int) -> float:
        """Seconds from the event to the next step, which follows the last save."""
        while True:
            assert process.poll() is None and time.time() - struck < 60, f"did not go on: {self.said()}"
            rows = self.rows()
            if resumed := [i for i, row in enumerate(rows) if row.get("event") == "resume" and row["time"] > struck]:
                after = [row for row in rows[resumed[-1] :] if "loss" in row]
                if after:
                    assert rows[resumed[-1]]["step"] == latest and after[0]["step"] == latest + 1, (
                        latest,
                        rows[resumed[-1] :],
                    )
                    return after[0]["time"] - struck
            elif rows and not latest and not [row for row in rows if row["time"] < struck]:
                return next((row["time"] for row in rows if "loss" in row), time.time()) - struck
            time.sleep(0.01)

    def check_end(self, event: Event, status: int, lost: int) -> None:
        said = self.said()
        lines = [line for line in said.splitlines() if "restart " not in line]
        assert "Traceback" not in said, said
        if event.kind == "launcher":
            assert status == -signal.SIGKILL, (status, said)
        elif event.kind in ("kill", "disk"):
            words = "was killed by SIGKILL" if event.kind == "kill" else "No space left on device"
            assert status == 1 and len(lines) == 1 and words in lines[0], (status, said)
            where = (
                r"rank \d+ \(host \S+, pid \d+\) was killed by SIGKILL (at step \d+, in |in .*before the first step)"
            )
            assert event.kind == "disk" or re.search(where, lines[0]), said
        else:
            # where it took no step, what is to be taken again was so before
            words = said + self.run.with_suffix(".out").read_text()
            took_none = "before the first step" in words or "before a step was under way" in words
            assert status == 128 + signal.Signals[event.kind] and (lost == 0 or took_none), (event, status, lost, said)

    def end(self) -> Figures:
        """Let the run go on a little to its end, and compare it with one that nothing happened to.

        Raises:
            AssertionError: they differ.
        """
        self.figures.steps = steps = self.latest() + SAVE_EVERY + 1
        runs = (self.run, self.folder / "undisturbed")
        for run, process in [(run, self.command(4, steps, run)) for run in runs]:
            assert process.wait(900) == 0, run.with_suffix(".err").read_text()
        one, other = ([row for row in read_metrics(run / "metrics.jsonl") if "loss" in row] for run in runs)
        for key in ("step", "samples", "tokens"):
            assert [row[key] for row in one] == [row[key] for row in other], f"{key} differ"
        self.figures.deviation = max(
            abs(a["loss"] - b["loss"]) / abs(b["loss"]) for a, b in zip(one, other, strict=True)
        )
        assert self.figures.deviation <= TOLERANCE, f"losses differ by {self.figures.deviation:.1e}"
        return self.figures


def is_child(pid: int, command: int) -> bool:
    try:
        process = psutil.Process(pid)
        return process.status() != psutil.STATUS_ZOMBIE and command in [parent.pid for parent in process.parents()]
    except psutil.Error:
        return False


def drawn(count: int, draw: random.Random) -> list[Event]:
    """Random events: more than half of them kills."""
    events = []
    for _ in range(count):
        kind = draw.choice(
            ("kill", "kill", "kill", "writer", "writer", "launcher", "SIGINT", "SIGTERM", "SIGUSR1", "disk")
        )
        rank = draw.randrange(4)
        moment = draw.choice(MOMENTS if kind in ("kill", "launcher") else MOMENTS[4:])
        events.append(
            Event(kind, "-" if kind == "disk" else moment, rank, draw.randrange(1, 60 if rank % 2 == 0 else 12))
        )
    return events


def faulty_command(argv: list[str]) -> int:
    """``meshwright``, with a disk that fails once where the environment says so."""
    from meshwright.cli.main import main

    if os.environ.get(FAULT):
        launch.train = faulty_train
    return main(argv)


def faulty_train(*arguments: Any) -> int:
    from support.disk import failing_disk, full

    from meshwright.training.trainer import Trainer

    rank, change, fired = os.environ[FAULT].split(":", 2)
    config, started = arguments[:2]

    def fail() -> OSError:
        os.close(os.open(fired, os.O_CREAT | os.O_WRONLY))
        return full()

    change = int(change) if os.environ["RANK"] == rank else 0
    if config.checkpoint.asynchronous:
        code = f"import sys; sys.path[:] = {sys.path!r}; import chaos; chaos.faulty_writer({change}, {fired!r}, "
        writer.command = lambda file: [sys.executable, "-c", f"{code}{file})"]
        return Trainer(config, started=started).run()
    with failing_disk(change, fail):
        return Trainer(config, started=started).run()


def faulty_writer(change: int, fired: str, file: int) -> None:
    """The process that writes for a rank, on a disk that fails once."""
    from support.disk import failing_disk, full

    with failing_disk(change, lambda: (Path(fired).touch(), full())[1]):
        writer.main(file)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("events", nargs="?", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--synchronous", action="store_true")
    given = parser.parse_args()
    folder = given.folder or Path(tempfile.mkdtemp(prefix="chaos-"))
    say = lambda text: print(text, flush=True)  # noqa: E731
    weather = Weather(folder, given.seed, say, asynchronous=not given.synchronous)
    weather.happen(drawn(given.events, weather.draw))
    print(weather.end().text())


if __name__ == "__main__":
    main()
