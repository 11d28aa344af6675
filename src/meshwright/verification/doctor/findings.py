"""Define a finding: one line of the doctor's report, with the command that repairs it."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from .trials import AXES

# --- define a finding

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


# --- write the doctor's report

WIDTH, NAME, STATUS = 118, 14, 4


def lines_of(finding: Finding, section_before: str) -> list[str]:
    """Return the lines of a finding, under a heading where its section is another than that of the one before."""
    heading = [] if finding.section == section_before else ["", finding.section]
    indent = " " * (STATUS + NAME + 6)
    is_long = len(finding.name) > NAME
    head = f"  {finding.status:<{STATUS}}  {finding.name:<{NAME}}  "
    text = textwrap.wrap(finding.text, WIDTH - len(indent), break_on_hyphens=False) or [""]
    first = [head.rstrip(), indent + text[0]] if is_long else [head + text[0]]
    return [*heading, *first, *(indent + line for line in text[1:])]


def closing(findings: Sequence[Finding], seconds: float) -> list[str]:
    """Return the last lines: the commands that repair, how much holds, and the time."""
    faults = [f for f in findings if f.status == FAILURE]
    repairs: dict[str, Finding] = {}
    for finding in findings:
        if finding.remedy:
            repairs.setdefault(finding.remedy, finding)
    lines = ["", "to repair"] if repairs else []
    for remedy, finding in repairs.items():
        lines += [f"  {finding.name}:", f"    {remedy}"]
    warned = sum(f.status == WARNING for f in findings)
    word = f"{len(faults)} of {len(findings)} fail" if faults else "all hold"
    return [*lines, "", f"{word}{f', {warned} warned of' if warned else ''} ({seconds:.0f} s)"]


def plain(findings: Sequence[Finding], seconds: float, version: str) -> dict[str, Any]:
    """Return everything as values of JSON."""
    by_section: dict[str, dict[str, Any]] = {}
    for finding in findings:
        own = {key: value for key, value in finding.plain().items() if key not in ("section", "name")}
        by_section.setdefault(finding.section, {})[finding.name] = own
    of_axes = {f.name.partition(" ")[0]: f.figures.get("verdict") for f in findings if f.section == TRIALS}
    return {
        "meshwright": version,
        "holds": holds(findings),
        "seconds": round(seconds, 1),
        "verdicts": {axis: of_axes.get(axis) for axis in AXES},
        "repairs": list(dict.fromkeys(f.remedy for f in findings if f.remedy)),
        **by_section,
    }


def holds(findings: Sequence[Finding]) -> bool:
    """Return whether nothing failed; warnings, and what is optional, leave that be."""
    return all(finding.status != FAILURE for finding in findings)
