"""Run the examination, and judge what it told: a finding for each stage, a verdict for each mesh axis."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from importlib import util
from typing import Any

from meshwright.core.errors import command, install_command
from meshwright.core.host import TESTED, installed
from meshwright.verification.doctor.findings import graphics_findings, host_findings, version_findings
from meshwright.verification.doctor.inside import AXES, EXCHANGE

from .findings import FAILURE, NOTE, OK, PRIVATE, TORCH, TRIALS, Finding, gibibytes

# --- judge what the process with torch told

Answer = Mapping[str, Any]
Ask = Callable[[str], Answer | None]
"""Stage → its answer: ``found``, ``error`` or ``timed_out``; None for a stage that was not reached."""
IMPORT, PACKAGE, POINTS = "torch", "meshwright.distributed", "private points"
EQUAL = "equal to one process"


def judged(ask: Ask | None) -> Iterator[Finding]:
    """Yield a finding for each stage as its answer comes; ``ask`` is None where there is no torch."""
    if ask is not None:
        yield from torch_findings(ask)
        yield from private_findings(ask(POINTS))
    answer = ask(EXCHANGE) if ask is not None else None
    if answer is not None and "found" in answer:  # two processes exchanged data
        text = f"2 processes: all_reduce, send and recv by {', '.join(answer['found']['messages'])}"
        yield Finding(TRIALS, EXCHANGE, OK, f"{text} ({answer['seconds']:.1f} s)", figures=answer["found"])
    else:
        yield Finding(TRIALS, EXCHANGE, FAILURE, f"2 processes: {_words(answer, ask)}")
    for axis in AXES:
        yield verdict(axis, ask)


def torch_findings(ask: Ask) -> Iterator[Finding]:
    """Yield build, devices and back ends; or why torch, or meshwright with it, cannot be imported."""
    answer = ask(IMPORT)
    if (trouble := _trouble(answer)) is not None:
        yield Finding(TORCH, "import", FAILURE, f"torch cannot be imported: {trouble}", _reinstall("torch", answer))
        return
    build = _found(answer)
    made_for = f"{'ROCm' if build['is_rocm'] else 'CUDA'} {build['accelerator']}" if build["accelerator"] else "the CPU"
    cudnn = f", cuDNN {build['cudnn']}" if build["cudnn"] else ""
    yield Finding(TORCH, "build", OK, f"{build['version']} for {made_for}{cudnn} in {build['folder']}", figures=build)
    meant = installed("torch")
    # a local part ("+cpu") counts where both have one
    first, second = (meant or "").split("+"), build["version"].split("+")
    is_same = first[0] == second[0] and (len(first) == 1 or len(second) == 1 or first[1] == second[1])
    if meant is not None and not is_same:
        text = f"metadata of torch {meant} lie first on the path, and {build['version']} in {build['folder']} is used"
        yield Finding(TORCH, "version", FAILURE, text, _reinstall("torch"), {"metadata": meant})
    answer = ask("devices")
    if (trouble := _trouble(answer)) is not None:
        yield Finding(TORCH, "devices", FAILURE, trouble)
    elif (found := _found(answer))["unusable"]:
        text = f"torch cannot use the GPUs of this host: {found['unusable']}"
        remedy = "update the NVIDIA driver, or install a build for it (pytorch.org/get-started)"
        yield Finding(TORCH, "devices", FAILURE, text, remedy, found)
    else:
        names = [d["name"] + (f" ({gibibytes(d['bytes'])})" if d["bytes"] else "") for d in found["devices"]]
        text = ", ".join(f"{names.count(name)} x {name}" for name in dict.fromkeys(names))
        status = OK if names else NOTE
        yield Finding(TORCH, "devices", status, text or "no GPU: ranks compute on the CPU", figures=found)
    answer = ask(PACKAGE)
    if (trouble := _trouble(answer)) is not None:
        remedy = _reinstall("torch", answer) if "torch" in trouble else ""
        yield Finding(TORCH, "distributed", FAILURE, f"{PACKAGE}: {trouble}", remedy)
        return
    found = _found(answer)
    names = [f"{name} {release}".strip() for name, release in found.items()]
    yield Finding(TORCH, "back ends", OK if names else FAILURE, ", ".join(names) or "none", figures=found)


def private_findings(answer: Answer | None) -> Iterator[Finding]:
    """Yield how many private points are here, and each that is not, with what it switches off."""
    if (trouble := _trouble(answer)) is not None:
        yield Finding(PRIVATE, "all", FAILURE, f"cannot be looked for: {trouble}")
        return
    found = _found(answer)
    gone, count = found["missing"], found["count"]
    yield Finding(PRIVATE, "all", NOTE if gone else OK, f"{count - len(gone)} of {count} are here", figures=found)
    for point in gone:
        package = point["path"].partition(".")[0]
        remedy = _reinstall(package) if package in TESTED else ""
        yield Finding(PRIVATE, point["path"], FAILURE, f"missing; needed by {point['needed_by']}", remedy)


def verdict(axis: str, ask: Ask | None) -> Finding:
    """Return the verdict on an axis of two ranks: equal, refused, failed or timed out."""
    answer = ask(axis) if ask is not None else None
    name = f"{axis} 2"
    if answer is not None and "found" in answer:
        figures = {**answer["found"], "seconds": answer["seconds"], "verdict": EQUAL}
        return Finding(TRIALS, name, OK, f"{EQUAL} ({answer['seconds']:.1f} s)", figures=figures)
    words = _words(answer, ask)
    remedy = command("doctor", "--limit", "300") if words.startswith("timed out") else ""
    return Finding(TRIALS, name, FAILURE, words, remedy, {"verdict": words})


def _words(answer: Answer | None, ask: Ask | None) -> str:
    """Say what became of a trial that has no result."""
    if ask is None:
        return "failed: torch is not installed"
    if answer is not None:
        if "timed_out" in answer:
            return f"timed out after {answer['timed_out']} s"
        return f"{'refused' if answer.get('refused') else 'failed'}: {answer['error']}"
    for stage in (IMPORT, PACKAGE):
        before = ask(stage)
        if before is not None and "timed_out" in before:
            return f"timed out: after {before['timed_out']} s {stage} was still being imported"
        if before is not None and "error" in before:
            return f"failed: {stage} cannot be imported"
    return "failed: the process with torch ended before"


def _found(answer: Answer | None) -> dict[str, Any]:
    return answer["found"] if answer is not None else {}


def _trouble(answer: Answer | None) -> str | None:
    """Return what went wrong in a stage; None where it has an answer."""
    if answer is None:
        return "not reached"
    if "found" in answer:
        return None
    return f"no answer within {answer['timed_out']} s" if "timed_out" in answer else answer["error"]


def _reinstall(package: str, answer: Answer | None = None) -> str:
    """Return the command that installs the newest tested release; none where only the time was short."""
    is_slow = answer is not None and "timed_out" in answer
    return "" if is_slow else install_command(f"{package}=={TESTED[package].newest}.*")


# --- run the examination

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

        def read() -> None:
            for line in itertools.chain(self._process.stdout or (), (None,)):
                self._lines.put((time.monotonic(), line))

        threading.Thread(target=read, daemon=True).start()

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
                status = self._process.wait(5)
                how = f"was killed by {signal.Signals(-status).name}" if status < 0 else f"ended with status {status}"
                self._noise.seek(0)
                last = (self._noise.read().strip().splitlines() or [""])[-1].strip()
                answer["error"] = f"the process {how}{f': {last}' if last else ''}"
            else:
                answer["timed_out"] = round(time.monotonic() - answer["began"])
        return answer

    def _is_answered(self, stage: str) -> bool:
        return not {"found", "error", "timed_out"}.isdisjoint(self._answers.get(stage, {}))

    def close(self) -> None:
        """End the process and all that it started."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._held.close()
