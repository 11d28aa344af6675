"""The matrix as a page of markdown."""

from __future__ import annotations

import platform
from collections import Counter
from collections.abc import Iterable, Mapping
from importlib.metadata import version

from benchmarks.survey.matrix import COLUMNS, STEPS, WORLDS, Cell, Judged, Row, rows

STATES = ("equal", "refused", "DIFFERS")

HEAD = """# Every layout against one process

Written by `make matrix` on {day} with torch {torch} and Python {python}: {summary}.

In each cell a small decoder was trained for {steps} steps by a layout, in some way, and by one process with plain torch
(docs/verify.md says what is compared). No size of the model is a multiple of the number of ranks, except with
float8, whose layers divide by 16.

- **Two numbers**: equal within rounding in all that is compared. They are the largest relative errors of a gradient
  of the first step
    (2-norm, each parameter for itself): in fp64 · fp32 of one model, or in bf16 of the tied · untied one. With float8
  one number is of
  fp32 around the products.
- **refused**: by a rule, before any process starts, for the reason under the table.
- **DIFFERS**: none of these; a bug.

`make matrix` needs no GPU and judges what has changed since the last time; `make matrix ARGS=--cold` judges
everything, and
`make matrix ARGS="--only compile"` the rows with that in their name, without writing this page.
"""


def summary(judged: Iterable[Judged]) -> str:
    """``n equal, n refused, n differ``."""
    count = Counter(one.state for one in judged)
    return ", ".join(f"{count[state]} {'differ' if state == 'DIFFERS' else state}" for state in STATES)


def page(found: Mapping[Cell, Judged]) -> str:
    """The whole page. ``found``: every cell of the matrix."""
    days, python = sorted({one.day for one in found.values()}), platform.python_version()
    day = days[0] if days[0] == days[-1] else f"{days[-1]}, from what was judged since {days[0]}"
    parts = [
        HEAD.format(
            day=day, steps=STEPS, torch=version("torch").split("+")[0], python=python, summary=summary(found.values())
        )
    ]
    there = rows()
    for world in WORLDS:
        parts.append(f"## {world} ranks\n")
        for layout in dict.fromkeys(row.layout for row in there if row.layout.world == world):
            parts.append(_table(str(layout), {row.way.name: row for row in there if row.layout == layout}, found))
    return "\n".join(parts)


def _table(corner: str, named: Mapping[str, Row], found: Mapping[Cell, Judged]) -> str:
    """A row for each of ``named``, a column for each of the matrix, and under it the reasons, each once."""
    notes: dict[str, int] = {}
    heads = [corner, *(f"{column.name} ({' · '.join(column.errors)})" for column in COLUMNS)]
    lines = [heads, ["---"] * len(heads)]
    for name, row in named.items():
        lines.append([name, *(_shown(found[Cell(row, column)], notes) for column in COLUMNS)])
    table = "".join(f"| {' | '.join(line)} |\n" for line in lines)
    under = "".join(f"{number}. {reason}\n" for reason, number in notes.items())
    return f"{table}\n{under}" if under else table


def _shown(judged: Judged, notes: dict[str, int]) -> str:
    if judged.state == "equal":
        return " · ".join(f"{error:.1e}".replace("e-0", "e-") for error in judged.errors)
    number = notes.setdefault(judged.reason, len(notes) + 1)
    return f"{'**DIFFERS**' if judged.state == 'DIFFERS' else judged.state} ({number})"
