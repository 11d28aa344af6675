"""Run steps in order, each in a process of its own with a time limit; a second call goes on where one was stopped."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from .results import FAILED, NOT_HERE, PASSED, SKIPPED, Result, Results

ROOT = Path(__file__).parents[2]
PATIENCE_SEC = 15.0
TAIL = 12
"""Lines of a failed step's output that are kept."""
WORDS = {PASSED: "ok", FAILED: "FAILED", SKIPPED: "skipped", NOT_HERE: NOT_HERE}


@dataclass(frozen=True)
class Step:
    """A named part of first contact.

    Attributes:
        name: "group/case".
        target: "module:function" of this package, which returns (figures, lines).
        arguments: keyword arguments of the function; JSON values.
        limit: seconds, the start of the process included.
    """

    name: str
    target: str
    arguments: dict[str, Any] = field(default_factory=dict)
    limit: float = 120.0


class OutOfTime(Exception):
    """The time of this call is over."""


def child_command(step: Step, out: Path) -> list[str]:
    """Return the command of a step's process."""
    call = json.dumps({"target": step.target, "arguments": step.arguments})
    return [sys.executable, "-m", "benchmarks.first_contact.child", call, str(out)]


def run_child(step: Step, folder: Path, seconds: float) -> Result | None:
    """Run a step in a process group of its own, and return its result; None if it took longer than ``seconds``."""
    logs = folder / "logs"
    logs.mkdir(exist_ok=True)
    log, out = logs / f"{step.name.replace('/', '-').replace(' ', '-')}.txt", logs / f"out-{os.getpid()}.json"
    out.unlink(missing_ok=True)
    path = os.pathsep.join([str(ROOT / "src"), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    with log.open("w", encoding="utf-8") as told:
        process = subprocess.Popen(
            child_command(step, out),
            stdout=told,
            stderr=subprocess.STDOUT,
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": path},
            start_new_session=True,
        )
        try:
            process.wait(seconds)
        except subprocess.TimeoutExpired:
            return None
        finally:
            _end(process)
    said = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
    if not out.exists():
        return Result(FAILED, why="\n".join([*said[-TAIL:], f"the process ended with status {process.returncode}"]))
    result = Result(**json.loads(out.read_text(encoding="utf-8")))
    out.unlink()
    return result


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a step's process with all that it started; torchrun ends its own, which are in sessions of theirs."""
    for number in (signal.SIGTERM, signal.SIGKILL) if process.poll() is None else (signal.SIGKILL,):
        with suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with suppress(subprocess.TimeoutExpired):
            process.wait(PATIENCE_SEC)


Start = Callable[[Step, Path, float], Result | None]


def run_steps(
    steps: Sequence[Step],
    results: Results,
    *,
    again: Sequence[str] = (),
    minutes: float = 0.0,
    start: Start = run_child,
    say: Callable[[str], None] = print,
) -> None:
    """Run the steps that have no result yet, and record each.

    Args:
        again: patterns of steps to repeat; "failed" names all that failed.
        minutes: begin nothing after this many, and leave a step that they cut short to the next call; 0: no end.
        start: runs one step within so many seconds; None where they did not suffice.

    Raises:
        OutOfTime: the minutes are over, and steps are left.
    """
    ends = time.monotonic() + 60 * minutes if minutes else float("inf")
    width = max((len(step.name) for step in steps), default=0)
    for step in steps:
        before = results.steps.get(step.name)
        if before is not None and not _is_asked(step.name, before, again):
            say(f"{step.name:<{width}}  {WORDS[before.status]}, by an earlier call")
            continue
        left = ends - time.monotonic()
        if left <= 0:
            raise OutOfTime
        begun = time.monotonic()
        result = start(step, results.path.parent, min(step.limit, left))
        seconds = time.monotonic() - begun
        if result is None:
            if left < step.limit:
                raise OutOfTime
            result = Result(FAILED, why=f"it took longer than its limit of {step.limit:.0f} s")
        result.seconds = round(seconds, 1)
        results.record(step.name, result)
        for line in _told(step.name, result, width):
            say(line)


def _is_asked(name: str, before: Result, again: Iterable[str]) -> bool:
    return any(fnmatch(name, pattern) or (pattern == "failed" and before.status == FAILED) for pattern in again)


def _told(name: str, result: Result, width: int) -> list[str]:
    reason = "" if result.status == FAILED or not result.why else f": {result.why}"
    head = f"{name:<{width}}  {WORDS[result.status]}, {result.seconds:.0f} s{reason}"
    more = result.why.splitlines() if result.status == FAILED else []
    return [head, *(f"    {line}" for line in (*result.lines, *more))]
