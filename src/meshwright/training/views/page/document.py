"""Write a run's page: its curves, a text sample, what was set, its events, plan and config in one HTML file."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable
from html import escape
from pathlib import Path
from typing import Any

from meshwright.core.config import to_dict
from meshwright.core.dtypes import bytes_text, duration_text
from meshwright.training.config import Config
from meshwright.training.metrics.metrics import NAME
from meshwright.training.run.request import read_request

from .charts import (
    MOST_POINTS,
    Chart,
    asset,
    breakable,
    charts_of_run,
    common_axis,
    figure,
    framed,
    hover_data,
    quantities,
    table,
    tiles,
)
from .history import ABSENT, History, RunState, moment, over_steps, read_history, state_of, time_left

OWN = ("run",)
"""Keys that name the run's own folder and say nothing of its training."""


def page(folder: Path, config: Config, *, refresh: int = 0) -> str:
    """Return the run in ``folder`` as an HTML page.

    Args:
        refresh: seconds after which a browser reads the file again; 0: never.

    Raises:
        IntegrityError: a line of its metrics was not written by meshwright.
    """
    from .plan_section import plan_section  # it imports torch, which a comparison of runs does without

    history = read_history(folder / NAME)
    state = state_of(folder, config, history)
    charts = charts_of_run(history)
    curves, data = curves_section(charts, "steps")
    again = f" · this page is read again every {refresh} s" if refresh else ""
    body = [
        f"<h1>{breakable(config.name)}</h1>",
        f'<p class="state {state.word}">{escape(f"{state}{again}")}</p>',
        f'<p class="soft path">{breakable(str(folder))}<br/>read on {time.strftime("%Y-%m-%d %H:%M:%S")}</p>',
        _tiles(history, state),
        *_notes(history),
        curves,
        _sample(history),
        _changed(read_request(folder) or config, history),
        _events(history),
        plan_section(folder),
        _config(config),
    ]
    return framed(config.name, [*body, TIP], script=asset("page.js"), data=data, refresh=refresh)


MARKS = {"resume": "dashed, the run was continued there", "skipped": "dotted, a step was skipped"}
"""Kind of a mark -> how it looks, and what it means."""
TIP = '<div id="tip" hidden=""></div>'


def curves_section(charts: list[Chart], by: str) -> tuple[str, str]:
    """Return figures on one axis as HTML, and the data for the script as JSON."""
    x = common_axis(charts, by)
    drawn = (
        f'<div class="charts">{"".join(figure(chart, x) for chart in charts)}</div>'
        if charts
        else "<p>No step was taken yet.</p>"
    )
    data = json.dumps([hover_data(chart, x) for chart in charts], allow_nan=False)
    kinds = {kind for chart in charts for kind, steps in chart.marks if steps}
    lines = "; ".join(MARKS[kind] for kind in sorted(kinds & set(MARKS)))
    note = f'<p class="soft">Vertical lines: {lines}.</p>' if lines else ""
    return f"<h2>Curves</h2>{note}{drawn}", data


def _tiles(history: History, state: RunState) -> str:
    known = quantities(history)
    skipped = history.last("skipped")
    left = time_left(state, history)
    rows = [
        ("progress", f"{state.step:,} of {state.steps:,} steps"),
        ("loss", known["loss"].words(history.last("loss"))),
        ("validation loss", known["validation_loss"].words(history.last("validation_loss"))),
        ("trained on", known["tokens"].words(history.last("tokens"))),
        ("speed", known["tokens_per_second"].words(history.last("tokens_per_second"))),
        ("memory of rank 0", known["memory_bytes"].words(history.last("memory_bytes"))),
        ("skipped", "–" if skipped is None else f"{skipped:,.0f} step{'s' * (skipped != 1)}"),
        ("time of training", duration_text(history.clock.last or 0.0)),
        *([("time left", left)] if left else []),
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


def _sample(history: History) -> str:
    found = history.sample
    if found is None:
        return ""
    given = found.prompt if found.text.startswith(found.prompt) else ""
    marked = f"<mark>{escape(_printable(given))}</mark>{escape(_printable(found.text[len(given) :]))}"
    about = (
        f"Written by the weights of step {found.step:,}; marked: the prompt."
        if given
        else (f"Written by the weights of step {found.step:,}.")
    )
    return f'<h2>Sample</h2><p class="soft">{about}</p><pre class="sample">{marked}</pre>'


def _printable(text: str) -> str:
    return "".join(c if c.isprintable() or c == "\n" else f"\\x{ord(c):02x}" for c in text.replace("\t", "    "))


def _events(history: History) -> str:
    if not history.events:
        return ""
    dropped = f'<p class="soft">{history.dropped:,} earlier ones are in the metrics.</p>' if history.dropped else ""
    rows = [
        [moment(event.get("time")), str(event.get("step", "")), str(event["event"]), _details(event)]
        for event in history.events
    ]
    return f"<h2>Events</h2>{dropped}{table(('time', 'step', 'event', 'details'), rows)}"


def _details(event: dict[str, Any]) -> str:
    """Return an event's values; those of a start are seconds, and those of a memory report bytes."""
    values = {name: value for name, value in event.items() if name not in ("event", "step", "time")}
    kind = event["event"]
    return ", ".join(f"{name} {_value(kind, value)}" for name, value in values.items())[:2000]


def _value(kind: object, value: object) -> str:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return str(value)
    if kind == "startup":
        return duration_text(value)
    if kind == "memory":
        return bytes_text(value)
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _changed(config: Config, history: History) -> str:
    """Return the keys that the user set to other values than the defaults, or changed when the run was continued."""
    known = {key: (shown, usual) for key, shown, usual in config_rows(config)}
    known |= {key: (shown_over_steps(history, key, ""), known.get(key, ("", ABSENT))[1]) for key in history.changes}
    rows = [[key, shown, usual] for key, (shown, usual) in known.items() if shown != usual]
    if not rows:
        return '<h2>Set for this run</h2><p class="soft">Nothing: every key has its default.</p>'
    return f"<h2>Set for this run</h2>{table(('key', 'value', 'default'), rows)}"


def shown_over_steps(history: History, key: str, value: str) -> str:
    """Return a key's value as text, or its values with their steps if it was changed when the run was continued."""
    return over_steps(history.changes[key]) if key in history.changes else value


def _config(config: Config) -> str:
    rows = list(config_rows(config))
    changed = (shown != usual for _, shown, usual in rows)
    return (
        f'<details><summary>Config</summary><p class="soft">In bold: what differs from the default.</p>'
        f"{table(('key', 'value'), [row[:2] for row in rows], changed)}</details>"
    )


def config_rows(config: Config) -> Iterable[tuple[str, str, str]]:
    """Yield (key, value, default) of a config as text; a dash where a section is absent."""
    usual = dict(_leaves(to_dict(Config())))
    for key, value in _leaves(to_dict(config)):
        if key not in OWN:
            yield key, _json(value), _json(usual[key]) if key in usual else ABSENT


def _json(value: Any) -> str:
    return "none" if value is None else json.dumps(value, ensure_ascii=False, default=str)


def _leaves(tree: dict[str, Any], path: str = "") -> Iterable[tuple[str, Any]]:
    for key, value in tree.items():
        name = f"{path}.{key}" if path else key
        if isinstance(value, dict):
            yield from _leaves(value, name)
        else:
            yield name, value
