"""Ask judges about cases, and print what they found."""

from __future__ import annotations

import json
import os
import queue
import re
import shlex
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from .cases import Case, order, write_scripts

TIMEOUT = 600
"""Seconds that a judge may take for a question."""


@dataclass(frozen=True)
class Verdict:
    """A judge's answer to one question.

    Attributes:
        error: why there is no answer; a question without one is neither found nor a false alarm.
    """

    fault: bool = False
    place: str = ""
    step: int = 0
    kind: str = ""
    ranks: tuple[int, ...] = ()
    words: str = ""
    error: str = ""
    seconds: float = 0.0


def parse(output: str) -> Verdict:
    """Read a judge's answer from the last line of its output.

    Raises:
        ValueError: the line is no answer.
    """
    lines = [line for line in output.splitlines() if line.strip()]
    if not lines:
        raise ValueError("it printed nothing")
    try:
        found = json.loads(lines[-1])
    except json.JSONDecodeError:
        raise ValueError(f"its last line is no JSON: {lines[-1][:200]}") from None
    if isinstance(found, dict) and "error" in found:
        raise ValueError(str(found["error"])[-300:])
    if not isinstance(found, dict) or found.get("verdict") not in ("fault", "sound"):
        raise ValueError(f'its last line has no "verdict" of "fault" or "sound": {lines[-1][:200]}')
    ranks, step = found.get("ranks") or [], found.get("step") or 0
    if not isinstance(step, int) or not isinstance(ranks, list) or not all(isinstance(rank, int) for rank in ranks):
        raise ValueError(f"step is a whole number and ranks a list of them: {lines[-1][:200]}")
    words = [str(found.get(key) or "") for key in ("place", "kind", "words")]
    return Verdict(found["verdict"] == "fault", words[0], step, words[1], tuple(sorted(ranks)), words[2])


class Judge:
    """A judge's command: one process for each question, or one for all if its last word is --serve."""

    def __init__(self, command: str):
        self.words = shlex.split(command)
        self.serves = self.words[-1:] == ["--serve"]
        self.common: dict[str, Any] = {"env": {"OMP_NUM_THREADS": "1"} | os.environ, "text": True, "errors": "replace"}
        self.process: subprocess.Popen[str] | None = None

    def ask(self, commands: dict[str, list[str]], question: str, folder: Path) -> Verdict:
        """Ask about one run of a case.

        Args:
            folder: where the judge may keep what belongs to the case.
        """
        given = {"one": shlex.join(commands["one"]), "many": shlex.join(commands[question])}
        given["keep"] = str(folder / "kept")
        os.makedirs(given["keep"], exist_ok=True)
        began, errors = time.monotonic(), ""
        try:
            output, errors = (self._served if self.serves else self._once)(given, folder)
            verdict = parse(output)
        except subprocess.TimeoutExpired:
            verdict = Verdict(error=f"no answer in {TIMEOUT} seconds")
        except OSError as error:
            verdict = Verdict(error=f"it cannot be run: {error}")
        except ValueError as error:
            verdict = Verdict(error=f"{error}; {errors.strip()[-300:]}".strip("; "))
        return Verdict(**{**asdict(verdict), "seconds": time.monotonic() - began})

    def _once(self, given: dict[str, str], folder: Path) -> tuple[str, str]:
        words = [word for key, value in given.items() for word in (f"--{key}", value)]
        done = subprocess.run([*self.words, *words], cwd=folder, capture_output=True, timeout=TIMEOUT, **self.common)
        return done.stdout, done.stderr

    def _served(self, given: dict[str, str], _: Path) -> tuple[str, str]:
        pipe = subprocess.PIPE
        if self.process is None or self.process.poll() is not None:
            self.process = subprocess.Popen(self.words, stdin=pipe, stdout=pipe, **self.common)
        process, late = self.process, threading.Event()
        timer = threading.Timer(TIMEOUT, lambda: late.set() or process.send_signal(signal.SIGINT))
        assert process.stdin is not None and process.stdout is not None
        timer.start()
        try:
            process.stdin.write(json.dumps(given) + "\n")
            process.stdin.flush()
            output = process.stdout.readline()
        finally:
            timer.cancel()
        if late.is_set() or not output:
            process.wait()
        if late.is_set():
            raise subprocess.TimeoutExpired(self.words, TIMEOUT)
        return output, ""

    def close(self) -> None:
        """Let a judge that serves end."""
        if self.process is not None:
            self.process.communicate()


@dataclass(frozen=True)
class Asked:
    """A case with a judge's answers to "sound" and, where there is a fault, "fault"."""

    case: Case
    verdicts: dict[str, Verdict]

    @property
    def marks(self) -> dict[str, bool]:
        """What the answers got right; without entries for a fault where there is none."""
        marks = {"false alarm": self.verdicts["sound"].fault}
        answer, verdict = self.case.answer, self.verdicts.get("fault")
        if answer is None or verdict is None:
            return marks
        marks["found"] = verdict.fault
        marks["placed"] = verdict.fault and re.fullmatch(answer.place, verdict.place) is not None
        marks["first step"] = verdict.fault and verdict.step == answer.step
        marks["kind"] = verdict.fault and verdict.kind == answer.kind
        marks["ranks"] = verdict.fault and verdict.ranks == answer.ranks
        return marks

    @property
    def errors(self) -> list[str]:
        return [f"{question}: {v.error}" for question, v in self.verdicts.items() if v.error]


def ask_all(cases: Sequence[Case], judge: str, jobs: int) -> Iterable[Asked]:
    """Ask a judge about all cases, ``jobs`` at a time, in order."""
    judges = queue.SimpleQueue[Judge]()
    for _ in range(jobs):
        judges.put(Judge(judge))

    def ask_about(case: Case) -> Asked:
        asked = judges.get()
        try:
            with tempfile.TemporaryDirectory(prefix="silent100-", ignore_cleanup_errors=True) as folder:
                commands = write_scripts(case, Path(folder))
                answers = {question: asked.ask(commands, question, Path(folder)) for question in order(case)}
            return Asked(case, answers)
        finally:
            judges.put(asked)

    with ThreadPoolExecutor(jobs) as pool:
        yield from pool.map(ask_about, cases)
    for _ in range(jobs):
        judges.get().close()


# --- the table

MARKS = ("found", "placed", "first step", "kind", "ranks")


@dataclass
class Score:
    """Counts over some cases."""

    faults: int = 0
    sound: int = 0
    false_alarms: int = 0
    unanswered: int = 0
    right: dict[str, int] = field(default_factory=lambda: dict.fromkeys(MARKS, 0))
    seconds: float = 0.0

    def add(self, asked: Asked) -> None:
        marks = asked.marks
        self.sound += 1
        self.false_alarms += marks["false alarm"]
        self.unanswered += len(asked.errors)
        self.seconds += sum(verdict.seconds for verdict in asked.verdicts.values())
        if "found" in marks:
            self.faults += 1
            for mark in MARKS:
                self.right[mark] += marks[mark]

    def row(self) -> list[str]:
        shares = [f"{self.right[m]} ({100 * self.right[m] // self.faults} %)" if self.faults else "–" for m in MARKS]
        return [
            str(self.faults),
            *shares,
            f"{self.false_alarms} of {self.sound}",
            str(self.unanswered),
            f"{self.seconds:.0f}",
        ]


def table(judge: str, every: Sequence[Asked]) -> str:
    """Lay out a judge's scores: all, then by tier, edge and axis."""
    groups: dict[tuple[str, str], Score] = {("all", ""): Score()}
    for what in ("tier", "edge", "axis"):
        for asked in sorted(every, key=lambda asked: str(getattr(asked.case, what))):
            groups.setdefault((what, str(getattr(asked.case, what))), Score()).add(asked)
    for asked in every:
        groups["all", ""].add(asked)
    head = ["", "faults", *MARKS, "false alarms", "no answer", "seconds"]
    rows = [head, *([f"{what} {value}".strip(), *score.row()] for (what, value), score in groups.items())]
    widths = [max(len(row[column]) for row in rows) for column in range(len(head))]
    lines = ["| " + " | ".join(word.ljust(w) for word, w in zip(row, widths, strict=True)) + " |" for row in rows]
    lines.insert(1, "|" + "|".join("-" * (w + 2) for w in widths) + "|")
    return "\n".join([f"judge: {judge}", "", *lines])


def plain(asked: Asked) -> dict[str, Any]:
    """Return a case's answers as JSON values."""
    answer = asdict(asked.case.answer) if asked.case.answer else None
    verdicts = {question: asdict(verdict) for question, verdict in asked.verdicts.items()}
    return {"case": asked.case.folder.name, "marks": asked.marks, "answer": answer, "verdicts": verdicts}
