"""Run the examination: what can be seen without torch, then what a process with torch tells, up to a time limit."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from importlib import util
from typing import Any

from .findings import Finding
from .graphics import graphics_findings
from .host import host_findings
from .judgement import judged
from .libraries import version_findings

LIMIT_S = 55.0
RESERVE_S = 3.0
"""Seconds that are left for the report when trials are given up."""
BOOT = (
    "import sys, json; sys.path[:] = json.loads(sys.argv[1]); from meshwright.verification.doctor.inside import main;"
    " main(float(sys.argv[2]))"
)
"""The process looks for packages where this one does, whatever it was started by."""


def examine(deadline: float) -> Iterator[Finding]:
    """Yield findings as they are made, until a time of ``time.monotonic``."""
    inside = None
    if util.find_spec("torch") is not None:
        with contextlib.suppress(OSError):  # no temporary folder is a finding of its own
            inside = Inside(deadline)
    try:
        yield from version_findings()
        yield from host_findings()
        yield from graphics_findings()
        yield from judged(inside.answer if inside is not None else None)
    finally:
        if inside is not None:
            inside.close()


class Inside:
    """The process with torch: reads its lines until it ends or the time is over."""

    def __init__(self, deadline: float):
        self.deadline = deadline
        self._held = contextlib.ExitStack()
        folder = tempfile.TemporaryDirectory(prefix="meshwright-doctor-", ignore_cleanup_errors=True)
        folder = self._held.enter_context(folder)
        noise = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115  (the stack closes it)
        self._noise = self._held.enter_context(noise)
        self._lines: queue.Queue[tuple[float, str | None]] = queue.Queue()
        self._answers: dict[str, dict[str, Any]] = {}
        self._has_ended = False
        seconds = max(1.0, deadline - time.monotonic() - RESERVE_S)
        self._process = subprocess.Popen(
            [sys.executable, "-c", BOOT, json.dumps(sys.path), str(seconds)],
            env={**os.environ, "TMPDIR": folder, "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=self._noise,
            text=True,
            start_new_session=True,
        )
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        for line in self._process.stdout or ():
            self._lines.put((time.monotonic(), line))
        self._lines.put((time.monotonic(), None))

    def answer(self, stage: str) -> dict[str, Any] | None:
        """Wait for a stage's answer: ``found``, ``error`` or ``timed_out``; None for one that never began."""
        while not self._is_answered(stage) and not self._has_ended:
            left = self.deadline - time.monotonic()
            try:
                at, line = self._lines.get(timeout=max(0.0, left))
            except queue.Empty:
                break
            if line is None:
                self._has_ended = True
            else:
                told = json.loads(line)
                self._answers.setdefault(told.pop("stage"), {"began": at}).update(told)
        answer = self._answers.get(stage)
        if answer is not None and not self._is_answered(stage):
            if self._has_ended:
                answer["error"] = self._end()
            else:
                answer["timed_out"] = round(time.monotonic() - answer["began"])
        return answer

    def _is_answered(self, stage: str) -> bool:
        return not {"found", "error", "timed_out"}.isdisjoint(self._answers.get(stage, {}))

    def _end(self) -> str:
        """Return how the process ended, and the last line that it printed."""
        status = self._process.wait(5)
        how = f"was killed by {signal.Signals(-status).name}" if status < 0 else f"ended with status {status}"
        self._noise.seek(0)
        last = (self._noise.read().strip().splitlines() or [""])[-1].strip()
        return f"the process {how}{f': {last}' if last else ''}"

    def close(self) -> None:
        """End the process and all that it started."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._held.close()
