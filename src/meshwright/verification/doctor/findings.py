"""Define a finding: one line of the doctor's report, with the command that repairs it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

OK, NOTE, WARNING, FAILURE = "ok", "-", "warn", "FAIL"
"""Statuses: as it should be; absent and optional; works, but look at it; does not work."""

VERSIONS, HOST, TORCH, PRIVATE, TRIALS = "versions", "host", "torch", "private points", "trials"
"""Sections, in the order of the report."""


@dataclass(frozen=True)
class Finding:
    """One line of the report."""

    section: str
    name: str
    status: str
    text: str
    remedy: str = ""
    """A command, or an instruction, that repairs it."""
    figures: Mapping[str, Any] = field(default_factory=dict)
    """The same for programs: plain numbers, texts and lists of them."""

    def plain(self) -> dict[str, Any]:
        """Return the finding as values of JSON."""
        return {key: value for key, value in asdict(self).items() if value not in ("", {})}


def gibibytes(number: float) -> str:
    return f"{number / 2**30:.1f} GiB" if number >= 2**30 else f"{number / 2**20:.0f} MiB"
