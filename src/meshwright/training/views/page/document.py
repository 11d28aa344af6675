"""Write a run's page: its curves, events, plan and config in one HTML file."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterable
from html import escape
from pathlib import Path
from typing import Any

from meshwright.core.config import to_dict
from meshwright.core.errors import ConfigError
from meshwright.core.units import bytes_text, count_text, duration_text
from meshwright.planning.plan import Plan
from meshwright.training.config import Config
from meshwright.training.metrics.metrics import NAME

from .charts import Chart, Curve, figure, hover_data, step_axis
from .frame import asset, framed, table, tiles
from .history import BY_SOURCE, History, read_history, thinned

MOST_POINTS = 1500
"""Most points of a curve; a longer one is thinned."""
MOST_MARKS = 200

COLLECTIVE = ("operation", "axis", "ranks", "unit", "elements", "dtype", "calls")
"""Head of the table of collectives."""


def page(folder: Path, config: Config) -> str:
    """Return the run in ``folder`` as an HTML page.

    Raises:
        IntegrityError: a line of its metrics was not written by meshwright.
    """
    history = read_history(folder / NAME)
    charts = _charts(history)
    x = step_axis(charts)
    drawn = (
        f'<div class="charts">{"".join(figure(chart, x) for chart in charts)}</div>'
        if charts
        else "<p>No step was taken yet.</p>"
    )
    body = [
        f"<h1>{escape(config.name)}</h1>",
        f'<p class="soft path">{escape(str(folder))} · read on {time.strftime("%Y-%m-%d %H:%M")}</p>',
        _tiles(history, config),
        *_notes(history),
        f"<h2>Curves</h2>{drawn}",
        _events(history),
        _plan(folder),
        _config(config),
    ]
    data = json.dumps([hover_data(chart, x) for chart in charts], allow_nan=False)
    return framed(config.name, [*body, '<div id="tip" hidden=""></div>'], script=asset("page.js"), data=data)


def _charts(history: History) -> list[Chart]:
    marks = [
        (
            "resume",
            [event["step"] for event in history.events if event["event"] == "resume" and event["step"] > 0][
                -MOST_MARKS:
            ],
        ),
        ("skipped", history.rises("skipped")[:MOST_MARKS]),
    ]
    by_source = {name: name.removeprefix(BY_SOURCE) for name in history.sources}
    wanted: list[tuple[str, dict[str, str], Any, str]] = [
        ("Loss", {"loss": "training", "validation_loss": "validation", **by_source}, _plain, ""),
        ("Tokens per second", {"tokens_per_second": "tokens/s"}, count_text, ""),
        ("Memory of rank 0", {"memory_bytes": "memory"}, lambda value: bytes_text(max(0, round(value))), "bytes"),
        ("Gradient norm", {"grad_norm": "gradient norm"}, _plain, ""),
        ("Learning rate", {"learning_rate": "learning rate"}, _plain, ""),
        ("Model FLOPs utilisation", {"mfu": "MFU"}, lambda value: f"{100 * value:.3g} %", "percent"),
        (
            "Own time of a step, of all ranks",
            {"own_time_max": "slowest rank", "own_time_mean": "mean"},
            lambda v: f"{v:.3g} s",
            "seconds",
        ),
    ]
    found = []
    for title, names, text, unit in wanted:
        curves = [
            Curve(label, thinned(history.series[name], MOST_POINTS))
            for name, label in names.items()
            if name in history.series
        ]
        if curves:
            found.append(Chart(title, curves, text, marks, unit))
    return found


def _plain(value: float) -> str:
    return f"{value:.4g}"


def _tiles(history: History, config: Config) -> str:
    def figure_of(name: str, text: Any) -> str:
        value = history.last(name)
        if value is None:
            return "–"
        return text(value) if math.isfinite(value) else str(value)

    begun, ended = history.seconds or (0.0, 0.0)
    rows = [
        ("step", f"{history.step:,} of {config.steps:,}"),
        ("loss", figure_of("loss", _plain)),
        ("validation loss", figure_of("validation_loss", _plain)),
        ("tokens", figure_of("tokens", count_text)),
        ("tokens/s", figure_of("tokens_per_second", count_text)),
        ("memory of rank 0", figure_of("memory_bytes", lambda value: bytes_text(max(0, round(value))))),
        ("steps skipped", figure_of("skipped", lambda value: f"{value:,.0f}")),
        ("first to last line", duration_text(max(0.0, ended - begun))),
    ]
    return tiles(rows)


def _notes(history: History) -> list[str]:
    notes = []
    longest = max((len(series.steps) for series in history.series.values()), default=0)
    if longest > MOST_POINTS:
        notes.append(
            f"Of curves with more than {MOST_POINTS:,} points (here up to {longest:,}) the extremes of equal portions"
            f" are drawn."
        )
    if history.left_out:
        notes.append(f"Validation losses of {len(history.left_out)} more sources are in the metrics and not drawn.")
    return [f'<p class="soft">{escape(note)}</p>' for note in notes]


def _events(history: History) -> str:
    if not history.events:
        return ""
    dropped = f'<p class="soft">{history.dropped:,} earlier ones are in the metrics.</p>' if history.dropped else ""
    rows = [
        [_moment(event.get("time")), str(event.get("step", "")), str(event["event"]), _details(event)]
        for event in history.events
    ]
    return f"<h2>Events</h2>{dropped}{table(('time', 'step', 'event', ''), rows)}"


def _moment(seconds: object) -> str:
    try:
        return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError, OSError):
        return ""


def _details(event: dict[str, Any]) -> str:
    values = {name: value for name, value in event.items() if name not in ("event", "step", "time")}
    return ", ".join(
        f"{name} {value:.4g}" if isinstance(value, float) else f"{name} {value}" for name, value in values.items()
    )[:2000]


def _plan(folder: Path) -> str:
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
        f"<details open><summary>Plan</summary>{table(('', ''), facts)}"
        f"<h2>Parameters</h2>{table(('name', 'count', 'shape', 'dtype', 'placement'), parameters)}"
        f"<h2>Collectives</h2>{table(COLLECTIVE, collectives)}</details>"
    )


def _config(config: Config) -> str:
    rows, usual = dict(_leaves(to_dict(config))), dict(_leaves(to_dict(Config())))
    cells = [(key, json.dumps(value, ensure_ascii=False, default=str)) for key, value in rows.items()]
    changed = (usual.get(key) != value for key, value in rows.items())
    return (
        f'<details open><summary>Config</summary><p class="soft">In bold: what differs from the default.</p>'
        f"{table(('key', 'value'), cells, changed)}</details>"
    )


def _leaves(tree: dict[str, Any], path: str = "") -> Iterable[tuple[str, Any]]:
    for key, value in tree.items():
        name = f"{path}.{key}" if path else key
        if isinstance(value, dict):
            yield from _leaves(value, name)
        else:
            yield name, value
