"""Faults for verify and for traces: is each found, and placed where a person would look? Are sound runs called equal?

    OMP_NUM_THREADS=1 python benchmarks/faults [library] [sound] [compositions] [traces] [--only WORDS]

library       faults in a copy of the library, one at a time, judged by ``verify``
sound         the library as it is
compositions  somebody else's ``parallelize_fn`` with plain torch: broken ones, and sound ones
traces        runs of a broken copy, compared with a trace that the sound library wrote

Each is found where verify (or the run) says that it differs, or refuses it; and placed where the first place that it
names is one that was expected (a pattern that is written beside each fault). The exit status is 1 where a fault is
not found, or a sound run is called different.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
SOURCES = ROOT / "src"
sys.path[:0] = [str(HERE), str(ROOT)]
LIMIT_SEC = 240
REHEARSED = ("return order.prove(facts, plan)\n", "return {}\n")

import compositions  # noqa: E402
import library  # noqa: E402
import traces  # noqa: E402


class Copy:
    """A copy of the library's sources, in which text can be replaced.

    Args:
        rehearses: cuts are rehearsed on a small copy of a model before it is laid out. That refuses most faults of
            tensor and pipeline parallelism before a process starts; without it, verify has to find them.
    """

    def __init__(self, folder: Path, *, rehearses: bool = True):
        self.root = folder / "src"
        shutil.copytree(SOURCES, self.root, ignore=shutil.ignore_patterns("__pycache__"))
        self._stamp = time.time_ns()
        if not rehearses:
            path = self.root / "meshwright/distributed/parallelize.py"
            text = path.read_text()
            if text.count(REHEARSED[0]) != 1:
                raise SystemExit(f"{path}: {REHEARSED[0]!r} does not stand there once; mend benchmarks/faults")
            path.write_text(text.replace(*REHEARSED))

    @contextmanager
    def with_fault(self, file: str, old: str, new: str) -> Iterator[None]:
        path = self.root / "meshwright" / file
        before = path.read_text()
        if before.count(old) != 1:
            raise SystemExit(f"{file}: {old!r} stands there {before.count(old)} times; mend benchmarks/faults")
        self._write(path, before.replace(old, new))
        try:
            yield
        finally:
            self._write(path, before)

    def _write(self, path: Path, text: str) -> None:
        """With another second for each text: what Python compiled before is known by it."""
        self._stamp += 2_000_000_000
        path.write_text(text)
        os.utime(path, ns=(self._stamp, self._stamp))

    def python(self, *words: Any, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(self.root), str(ROOT)]), "OMP_NUM_THREADS": "1"}
        return subprocess.run(
            [sys.executable, *map(str, words)],
            env=environment,
            cwd=cwd,
            capture_output=True,
            text=True,
            timeout=LIMIT_SEC,
            check=False,
        )

    def judge(self, kind: str, number: int) -> dict[str, Any]:
        try:
            done = self.python(HERE / "judge.py", kind, number)
        except subprocess.TimeoutExpired:
            return {"crashed": f"no end within {LIMIT_SEC} s"}
        try:
            return json.loads(done.stdout.splitlines()[-1])
        except (IndexError, ValueError):
            return {"crashed": (done.stderr.strip().splitlines() or ["said nothing"])[-1]}


class Count:
    """What came of the cases of one kind."""

    def __init__(self, kind: str):
        self.kind, self.cases, self.found, self.placed = kind, 0, 0, 0
        self.sound = self.alarms = 0
        self.more = ""

    def of_fault(self, what: str, where: str, said: dict[str, Any]) -> None:
        place = said.get("place") or (
            "refused: " + " ".join(said["refused"].split()) if "refused" in said else said.get("crashed", "")
        )
        is_found = "place" in said or "refused" in said
        is_placed = is_found and re.search(where, place) is not None
        self.cases, self.found, self.placed = self.cases + 1, self.found + is_found, self.placed + is_placed
        word = "placed" if is_placed else "found " if is_found else "MISSED"
        print(f"{word}  {what}: {place[:200] or 'called equal'}", flush=True)

    def of_sound(self, what: str, said: dict[str, Any]) -> None:
        self.sound, self.alarms = self.sound + 1, self.alarms + (not said.get("equal"))
        if not said.get("equal"):
            print(f"ALARM   {what}: {said.get('place') or said.get('refused') or said.get('crashed')}", flush=True)

    def line(self) -> str:
        faults = f"{self.found} of {self.cases} faults found, {self.placed} placed" if self.cases else ""
        sound = f"{self.sound} sound runs, {self.alarms} false alarms" if self.sound else ""
        return f"{self.kind}: {'; '.join(filter(None, (faults, self.more, sound)))}"


def library_faults(copy: Copy, only: str) -> Count:
    count, refused = Count("in a copy of the library"), 0
    with tempfile.TemporaryDirectory() as folder:
        unrehearsed = Copy(Path(folder), rehearses=False)
        for number, fault in enumerate(library.FAULTS):
            if only not in fault.what:
                continue
            said = judged(copy, number)
            if "rehearsed" in said.get("refused", ""):
                refused, said = refused + 1, judged(unrehearsed, number)
            count.of_fault(f"{fault.what} [{fault.layout}]", fault.where, said)
    count.more = f"{refused} of them refused by a rehearsal before the start"
    return count


def judged(copy: Copy, number: int) -> dict[str, Any]:
    fault = library.FAULTS[number]
    with copy.with_fault(fault.file, fault.old, fault.new):
        return copy.judge("fault", number)


def sound_runs(copy: Copy, only: str) -> Count:
    count = Count("the library as it is")
    for number, (_, layout, techniques) in enumerate(library.SOUND):
        if only in f"{layout} {techniques}":
            count.of_sound(f"{layout} {techniques}", copy.judge("sound", number))
    return count


def composed(copy: Copy, only: str) -> Count:
    count = Count("by parallelize_fn")
    for number, case in enumerate(compositions.CASES):
        if only in case.what:
            said = copy.judge("composition", number)
            count.of_fault(case.what, case.where, said) if case.where else count.of_sound(case.what, said)
    return count


def traced(copy: Copy, only: str) -> Count:
    count = Count("by a trace")
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryDirectory() as other:
        runs, unrehearsed = traces.Runs(copy, Path(folder)), Copy(Path(other), rehearses=False)
        for layout in traces.SOUND:
            if only in str(layout):
                count.of_sound(f"a run with {layout}", runs.check(layout))
        for fault in traces.FAULTS:
            if only not in fault.what:
                continue
            with (
                copy.with_fault(fault.file, fault.old, fault.new),
                unrehearsed.with_fault(fault.file, fault.old, fault.new),
            ):
                said = runs.check(fault.layout)
                if "rehearsed" in said.get("refused", ""):
                    said = runs.check(fault.layout, unrehearsed)
            count.of_fault(f"{fault.what} [{fault.layout}]", fault.where, said)
    return count


KINDS = {"library": library_faults, "sound": sound_runs, "compositions": composed, "traces": traced}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kinds", nargs="*", metavar="kind", help=", ".join(KINDS))
    parser.add_argument("--only", default="", help="cases whose words hold this")
    given = parser.parse_args()
    if unknown := sorted(set(given.kinds) - set(KINDS)):
        parser.error(f"{unknown[0]}: no kind; there are {', '.join(KINDS)}")
    begun, counts = time.monotonic(), []
    with tempfile.TemporaryDirectory() as folder:
        copy = Copy(Path(folder))
        for kind in given.kinds or KINDS:
            counts.append(KINDS[kind](copy, given.only))
    print()
    for count in counts:
        print(count.line())
    faults, placed = sum(count.cases for count in counts), sum(count.placed for count in counts)
    print(
        f"all: {sum(count.found for count in counts)} of {faults} faults found, {placed} placed;"
        f" {time.monotonic() - begun:.0f} s"
    )
    return int(any(count.found < count.cases or count.alarms for count in counts))


if __name__ == "__main__":
    raise SystemExit(main())
