"""Show a run's plan on its page: mesh, placements and collectives."""

from __future__ import annotations

from html import escape
from pathlib import Path

from meshwright.core.errors import ConfigError
from meshwright.planning.plan import Plan

from .charts import table

COLLECTIVE = ("operation", "axis", "ranks", "unit", "elements", "dtype", "calls")
"""Head of the table of collectives."""


def plan_section(folder: Path) -> str:
    """Return the run's plan as HTML; empty without one."""
    path = folder / "plan.json"
    if not path.is_file():
        return ""
    try:
        plan = Plan.from_json(path.read_text(encoding="utf-8", errors="replace"))
    except ConfigError as error:
        return f"<details><summary>Plan</summary><p>{escape(f'{path.name} cannot be read: {error}')}</p></details>"
    p = plan.precision
    facts = [
        ("model", plan.model),
        ("ranks", f"{plan.world} ({plan.device})"),
        ("mesh", " × ".join(f"{axis}={size}" for axis, size in plan.mesh)),
        ("data parallel", plan.data.technique),
        ("dtypes", f"master {p.master}, compute {p.compute}, reduce {p.reduce}, output {p.output or 'as computed'}"),
        ("activation checkpointing", plan.activation_checkpointing),
        ("compiled", f"{len(plan.compiled)} modules" if plan.compiled else "nothing"),
        ("frozen", f"{len(plan.frozen)} parameters" if plan.frozen else "nothing"),
        *(("note", note) for note in plan.notes),
    ]
    parameters = [
        [
            row.pattern,
            str(row.count),
            "×".join(map(str, row.shape)),
            row.dtype,
            ", ".join(f"{axis}: {how}" for axis, how in row.placements),
        ]
        for row in plan.parameters
    ]
    collectives = [
        [
            c.op,
            c.axis,
            str(c.ranks),
            c.unit or "(root)",
            f"{c.elements:,}",
            c.dtype,
            f"{c.calls or 'buckets'} per {c.per}",
        ]
        for c in plan.collectives
    ]
    return (
        f"<details><summary>Plan</summary>{table(('', ''), facts)}"
        f"<h2>Parameters</h2>{table(('name', 'count', 'shape', 'dtype', 'placement'), parameters)}"
        f"<h2>Collectives</h2>{table(COLLECTIVE, collectives)}</details>"
    )
