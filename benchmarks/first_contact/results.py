"""The results of steps: one JSON file per device, written whole after each step."""

from __future__ import annotations

import hashlib
import json
import os
import sys
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

PASSED, FAILED, SKIPPED, NOT_HERE = "passed", "failed", "skipped", "not on the pretend device"


@dataclass
class Result:
    """The end of a step.

    Attributes:
        status: passed, failed, skipped, or not on the pretend device.
        seconds: wall time, start of the process included.
        figures: what was measured, by name; JSON values.
        lines: what to print.
        why: the last lines of a traceback, or the reason for skipping.
    """

    status: str
    seconds: float = 0.0
    figures: dict[str, Any] = field(default_factory=dict)
    lines: list[str] = field(default_factory=list)
    why: str = ""


def sources_key(package: Path, *also: str) -> str:
    """Return a digest of a package's sources, the Python that runs them and what else decides their numbers."""
    digest = hashlib.sha256(repr((sys.version_info[:3], also)).encode())
    for path in sorted(package.rglob("*.py")):
        digest.update(path.relative_to(package).as_posix().encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()[:12]


def write_atomically(path: Path, text: str) -> None:
    """Write a file so that no reader finds half of it."""
    beside = path.with_name(f"{path.name}.{os.getpid()}")
    beside.write_text(text, encoding="utf-8")
    os.replace(beside, path)


class Results:
    """All results of one device, kept in ``folder/results.json``.

    Results of other sources are stale: their file is renamed, so that they stay apart.

    Attributes:
        set_aside: the file of stale results, if there was one.
    """

    def __init__(self, folder: Path, key: str):
        self.path, self.key = folder / "results.json", key
        self.steps: dict[str, Result] = {}
        self.set_aside: Path | None = None
        folder.mkdir(parents=True, exist_ok=True)
        if self.path.exists():
            self._read()

    def _read(self) -> None:
        try:
            found = json.loads(self.path.read_text(encoding="utf-8"))
            before, steps = found["sources"], {name: Result(**result) for name, result in found["steps"].items()}
        except (ValueError, KeyError, TypeError):
            before, steps = "unreadable", {}
        if before == self.key:
            self.steps = steps
        else:
            self.set_aside = self.path.with_name(f"results-{before}.json")
            os.replace(self.path, self.set_aside)

    def record(self, name: str, result: Result) -> None:
        """Keep the result of a step, on disk before this returns."""
        self.steps[name] = result
        held = {"sources": self.key, "steps": {name: asdict(one) for name, one in self.steps.items()}}
        write_atomically(self.path, json.dumps(held, indent=1) + "\n")

    def count(self, status: str) -> int:
        return sum(result.status == status for result in self.steps.values())
