"""The Markdown section of results, for docs/benchmarks.md."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from .results import FAILED, PASSED, SKIPPED, Result
from .speed import percent


def section(steps: Mapping[str, Result], *, is_dry: bool) -> str:
    """Return all results as one section."""
    facts = steps["facts"].figures if "facts" in steps else {}
    lines = [
        f"## First contact: {facts.get('device', 'unknown device')}",
        "",
        *_machine(facts),
        *(["Dry run: sizes are tiny, and the figures say nothing about speed.", ""] if is_dry else []),
        *_speeds({name[6:]: r for name, r in steps.items() if name.startswith("speed/")}),
        *_loops({name[6:]: r for name, r in steps.items() if name.startswith("loops/")}),
        *_parity({name: r for name, r in steps.items() if name.startswith(("parity/", "ranks/"))}),
        *_rest({name: r for name, r in steps.items() if name.startswith(("gloo/", "kernels/", "tests/", "cluster/"))}),
        *_failures(steps),
    ]
    return "\n".join(lines).rstrip() + "\n"


def table(head: Sequence[str], rows: Sequence[Sequence[Any]]) -> Iterator[str]:
    """Yield a Markdown table, and a blank line; nothing without rows."""
    if not rows:
        return
    yield f"| {' | '.join(head)} |"
    yield f"|{'---|' * len(head)}"
    for row in rows:
        cells = (str(cell).replace("|", "\\|").replace("\n", " ") for cell in row)
        yield f"| {' | '.join(cells)} |"
    yield ""


def _machine(facts: Mapping[str, Any]) -> Iterator[str]:
    if not facts:
        return
    packages = ", ".join(f"{name} {number}" for name, number in facts["packages"].items())
    yield (
        f"{facts['date']}, commit {facts['commit']}; {facts['devices']} × {facts['device']} of"
        f" {facts['memory'] / 1e9:.1f} GB, driver {facts['driver']}, CUDA {facts['cuda']}, NCCL {facts['nccl']}; torch"
        f" {facts['torch']}, Python {facts['python']}; {facts['cores']} cores of {facts['cpu']}; {packages}."
    )
    yield ""


def _speeds(steps: Mapping[str, Result]) -> Iterator[str]:
    rows = []
    for name, result in steps.items():
        f = result.figures
        if result.status != PASSED:
            rows.append((name, result.status, "", "", "", _first(result.why)))
            continue
        note = f["setting"] + (f"; estimate: {f['not foreseen']}" if f["not foreseen"] else "")
        if known := f["published"]:
            note += f"; published {known['tokens/s']:,} tokens/s, {percent(known['MFU'])}, {known['GB']} GB"
            note += f" ({known['who']})"
        rows.append(
            (
                name,
                f"{f['tokens/s']:,.0f}",
                f"{percent(f['MFU'])} ({percent(f['MFU of all parameters'])})",
                f"{f['bytes'] / 1e9:.1f}",
                f"{f['bytes foreseen'] / 1e9:.1f}",
                note,
            )
        )
    head = ("step", "tokens/s", "MFU (embedding counted)", "GB at peak", "GB foreseen", "setting")
    yield from table(head, rows)


def _loops(steps: Mapping[str, Result]) -> Iterator[str]:
    rows = []
    for name, result in steps.items():
        if result.status != PASSED:
            rows.append((name, result.status, "", "", "", _first(result.why)))
            continue
        for who in ("ours", "theirs"):
            f = result.figures[who]
            idle = 1 - f["busy"] / f["span"] if f["span"] else 0.0
            ratio = f"{result.figures['ratio']:.3f}" if who == "ours" else ""
            rows.append(
                (
                    f"{name}, {who}",
                    f"{1e3 * f['seconds']:.1f}",
                    f["launches"],
                    f"{1e3 * f['busy']:.1f}",
                    percent(idle),
                    ratio,
                )
            )
    yield from table(("loop", "ms a step", "launches", "ms of kernels", "gaps", "ours / theirs"), rows)


def _parity(steps: Mapping[str, Result]) -> Iterator[str]:
    rows = [
        (
            name,
            result.status,
            f"{result.figures['error']:.1e}" if "error" in result.figures else "",
            f"{result.figures['bound']:.1e}" if "bound" in result.figures else "",
            _first(result.why) or result.figures.get("worst", ""),
        )
        for name, result in steps.items()
    ]
    yield from table(("against plain torch on the same device", "", "error", "bound", "farthest from its bound"), rows)


def _rest(steps: Mapping[str, Result]) -> Iterator[str]:
    rows = [
        (name, result.status, "; ".join(result.lines) if len(result.lines) < 3 else "", _first(result.why))
        for name, result in steps.items()
    ]
    yield from table(("step", "", "found", "why"), rows)
    if "kernels/table" in steps and steps["kernels/table"].status == PASSED:
        yield from table(("attention", "kernel"), list(steps["kernels/table"].figures.items()))


def _failures(steps: Mapping[str, Result]) -> Iterator[str]:
    for name, result in steps.items():
        if result.status == FAILED:
            yield from (f"{name} failed:", "", *(f"    {line}" for line in result.why.splitlines()), "")


def _first(why: str) -> str:
    """Return the line of a reason or a traceback that says most."""
    lines = [line for line in why.splitlines() if line.strip()]
    return lines[-1].strip() if lines else ""


def summary(steps: Mapping[str, Result]) -> str:
    """Say in a line how many steps ended how."""
    statuses = [result.status for result in steps.values()]
    return ", ".join(
        f"{statuses.count(status)} {status}" for status in dict.fromkeys([PASSED, FAILED, SKIPPED, *statuses])
    )
