"""Write a run's page: its curves, a text sample, what was set, its events, plan and config."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from meshwright.core.config import to_dict
from meshwright.core.dtypes import bytes_text, count_text, duration_text
from meshwright.core.errors import ConfigError
from meshwright.training.config import Config
from meshwright.training.metrics.metrics import NAME
from meshwright.training.run.request import read_request

from .drawing import Axis, Curve, Figure, Html, document, element, folded, soft, table, tiles
from .history import (
    ABSENT,
    BY_SOURCE,
    OF_PAIRS,
    History,
    Series,
    moment,
    over_steps,
    read_history,
    state_of,
    thinned,
    time_left,
)

# --- choose what is drawn of a run's metrics

MOST_POINTS = 1500
"""Most points of a curve; a longer one is thinned."""
MOST_MARKS = 200
AXES = {
    "steps": Axis("optimizer steps", "steps"),
    "tokens": Axis("tokens trained on", "count"),
    "seconds": Axis("of training", "seconds"),
}
"""Quantities that curves may be drawn over."""


def plain(value: float) -> str:
    """Format a number with four digits, or whole where it has a few more."""
    return f"{value:,.0f}" if 9999.5 <= abs(value) < 1e7 else f"{value:.4g}"


FORMS: dict[str, Callable[[float], str]] = {
    "plain": plain,
    "count": count_text,
    "bytes": lambda value: bytes_text(max(0, round(value))),
    "percent": lambda value: f"{100 * value:.3g} %",
}


@dataclass(frozen=True)
class Quantity:
    """A quantity of the metrics: the title of its figure, its unit, and the form of its values (see ``Axis``)."""

    title: str
    unit: str
    form: str = "plain"

    def words(self, value: float | None) -> str:
        """Return a value with its unit; a dash where there is none."""
        if value is None or not math.isfinite(value):
            return ABSENT if value is None else str(value)
        text, has_unit = FORMS[self.form](value), self.form not in ("bytes", "percent")
        return f"{text} {self.unit}" if has_unit and not self.unit.startswith("no unit") else text


def quantities(history: History) -> dict[str, Quantity]:
    """Return the quantities of a run by their names in the metrics; a loss is of tokens, or of pairs of answers."""
    loss = "nats/pair" if OF_PAIRS in history.series else "nats/token"
    return {
        "loss": Quantity("Loss", loss),
        "validation_loss": Quantity("Validation loss", loss),
        "tokens_per_second": Quantity("Speed", "tokens/s", "count"),
        "memory_bytes": Quantity("Memory of rank 0", "bytes", "bytes"),
        "grad_norm": Quantity("Gradient norm", "no unit, L2 norm before clipping"),
        "learning_rate": Quantity("Learning rate", "no unit"),
        "mfu": Quantity("Model FLOPs utilisation", "% of the peak", "percent"),
        "tokens": Quantity("Tokens", "tokens", "count"),
    }


CURVES = {
    "loss": "training",
    "tokens_per_second": "tokens/s",
    "memory_bytes": "memory",
    "grad_norm": "gradient norm",
    "learning_rate": "learning rate",
    "mfu": "MFU",
}
"""Quantities that have a figure on a run's page, and the names of their curves."""


def placed(history: History, series: Series, by: str, most: int = MOST_POINTS) -> list[tuple[float, float]]:
    """Return at most so many points of a series over steps, tokens or seconds, without those of unknown place."""
    points = thinned(series, most)
    if by == "steps":
        return [*points]
    over = history.clock if by == "seconds" else history.series.get("tokens", Series())
    places = dict(zip(over.steps, over.values, strict=True))
    return [(places[step], value) for step, value in points if math.isfinite(places.get(step, math.nan))]


def curves_section(figures: Sequence[Figure]) -> list[str | Sequence[Figure]]:
    """Return figures beside each other, and what their vertical lines mean."""
    means = {"resume": "dashed, the run was continued there", "skipped": "dotted, a step was skipped"}
    kinds = {kind for figure in figures for kind, steps in figure.marks if steps}
    note = "; ".join(means[kind] for kind in sorted(kinds))
    return [
        element("h2", "Curves"),
        soft(f"Vertical lines: {note}.") if note else "",
        figures or element("p", "No step was taken yet."),
    ]


def _figures(history: History) -> list[Figure]:
    known, found = quantities(history), []
    resumed = [event["step"] for event in history.events if event["event"] == "resume" and event["step"] > 0]
    marks = [("resume", resumed[-MOST_MARKS:]), ("skipped", history.rises("skipped")[:MOST_MARKS])]
    for name, label in CURVES.items():
        labels = {name: label}
        if name == "loss":
            labels |= {"validation_loss": "validation", **{key: key.removeprefix(BY_SOURCE) for key in history.sources}}
        series = {label: history.series[key] for key, label in labels.items() if key in history.series}
        curves = [Curve(label, thinned(one, MOST_POINTS)) for label, one in series.items()]
        if curves:
            y = Axis(known[name].unit, known[name].form)
            found.append(Figure(known[name].title, curves, AXES["steps"], y, marks))
    return found


# --- write a run's page

OWN = ("run",)
"""Keys that name the run's own folder and say nothing of its training."""


def page(folder: Path, config: Config, *, refresh: int = 0) -> str:
    """Return the run in ``folder`` as an HTML page.

    Args:
        refresh: seconds after which a browser reads the file again; 0: never.

    Raises:
        IntegrityError: a line of its metrics was not written by meshwright.
    """
    history = read_history(folder / NAME)
    state = state_of(folder, config, history)
    again = f" · this page is read again every {refresh} s" if refresh else ""
    place = element("p", str(folder), Html("<br/>"), f"read on {moment(time.time())}", class_="soft path")
    known, last = quantities(history), history.last
    skipped, left = last("skipped"), time_left(state, history)
    longest = max((len(series.steps) for series in history.series.values()), default=0)
    sections = [
        element("h1", config.name),
        element("p", f"{state}{again}", class_=f"state {state.word}"),
        place,
        tiles(
            [
                ("progress", f"{state.step:,} of {state.steps:,} steps"),
                ("loss", known["loss"].words(last("loss"))),
                ("validation loss", known["validation_loss"].words(last("validation_loss"))),
                ("trained on", known["tokens"].words(last("tokens"))),
                ("speed", known["tokens_per_second"].words(last("tokens_per_second"))),
                ("memory of rank 0", known["memory_bytes"].words(last("memory_bytes"))),
                ("skipped", ABSENT if skipped is None else f"{skipped:,.0f} step{'s' * (skipped != 1)}"),
                ("time of training", duration_text(history.clock.last or 0.0)),
                *([("time left", left)] if left else []),
            ]
        ),
        soft(
            f"Of curves with more than {MOST_POINTS:,} points (here up to {longest:,}) the extremes of equal portions"
            f" are drawn."
        )
        if longest > MOST_POINTS
        else "",
        soft(f"Validation losses of {len(history.left_out)} more sources are in the metrics and not drawn.")
        if history.left_out
        else "",
        *curves_section(_figures(history)),
        *_sample(history),
        *_changed(read_request(folder) or config, history),
        *_events(history),
        _plan(folder),
        _config(config),
    ]
    return document(config.name, sections, refresh)


def _sample(history: History) -> list[str]:
    found = history.sample
    if found is None:
        return []
    given = found.prompt if found.text.startswith(found.prompt) else ""
    note = f"Written by the weights of step {found.step:,}{'; marked: the prompt' * bool(given)}."
    marked = element("mark", _printable(given)), _printable(found.text[len(given) :])
    return [element("h2", "Sample"), soft(note), element("pre", *marked, class_="sample")]


def _printable(text: str) -> str:
    return "".join(c if c.isprintable() or c == "\n" else f"\\x{ord(c):02x}" for c in text.replace("\t", "    "))


def _events(history: History) -> list[str]:
    dropped = soft(f"{history.dropped:,} earlier ones are in the metrics.") if history.dropped else ""
    rows = [
        [moment(event.get("time")), str(event.get("step", "")), str(event["event"]), _details(event)]
        for event in history.events
    ]
    return [element("h2", "Events"), dropped, table(("time", "step", "event", "details"), rows)] if rows else []


def _details(event: Mapping[str, Any]) -> str:
    """Return an event's values; those of a start are seconds, and those of a memory report bytes."""
    units: dict[object, Callable[[Any], str]] = {"startup": duration_text, "memory": bytes_text}
    text = units.get(str(event["event"]), lambda value: f"{value:.4g}" if isinstance(value, float) else str(value))
    values = {name: value for name, value in event.items() if name not in ("event", "step", "time")}
    return ", ".join(
        f"{name} {str(value) if isinstance(value, bool) or not isinstance(value, int | float) else text(value)}"
        for name, value in values.items()
    )[:2000]


def _changed(config: Config, history: History) -> list[str]:
    """Return the keys that the user set to other values than the defaults, or changed when the run was continued."""
    known = {key: (shown, usual) for key, shown, usual in config_rows(config)}
    known |= {key: (over_steps(history.changes[key]), known.get(key, ("", ABSENT))[1]) for key in history.changes}
    rows = [[key, shown, usual] for key, (shown, usual) in known.items() if shown != usual]
    none = soft("Nothing: every key has its default.")
    return [element("h2", "Set for this run"), table(("key", "value", "default"), rows) if rows else none]


def _config(config: Config) -> Html:
    rows = list(config_rows(config))
    changed = (shown != usual for _, shown, usual in rows)
    note = soft("In bold: what differs from the default.")
    return folded("Config", note, table(("key", "value"), [row[:2] for row in rows], changed))


def config_rows(config: Config) -> Iterable[tuple[str, str, str]]:
    """Yield (key, value, default) of a config as text; a dash where a section is absent."""
    usual = dict(_leaves(to_dict(Config())))
    for key, value in _leaves(to_dict(config)):
        if key not in OWN:
            yield key, value, usual.get(key, ABSENT)


def _leaves(tree: Mapping[str, Any], path: str = "") -> Iterable[tuple[str, str]]:
    for key, value in tree.items():
        if isinstance(value, dict):
            yield from _leaves(value, f"{path}{key}.")
        else:
            yield f"{path}{key}", "none" if value is None else json.dumps(value, ensure_ascii=False, default=str)


def _plan(folder: Path) -> str:
    """Return the run's plan: mesh, placements and collectives; empty without one."""
    from meshwright.planning.plan import Plan  # it imports torch, which a comparison of runs does without

    path = folder / "plan.json"
    if not path.is_file():
        return ""
    try:
        plan = Plan.from_json(path.read_text(encoding="utf-8", errors="replace"))
    except ConfigError as error:
        return folded("Plan", element("p", f"{path.name} cannot be read: {error}"))
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
        (
            one.pattern,
            f"{one.count}",
            "×".join(map(str, one.shape)),
            one.dtype,
            ", ".join(map(": ".join, one.placements)),
        )
        for one in plan.parameters
    ]
    collectives = [
        (
            c.op,
            c.axis,
            f"{c.ranks}",
            c.unit or "(root)",
            f"{c.elements:,}",
            c.dtype,
            f"{c.calls or 'buckets'} per {c.per}",
        )
        for c in plan.collectives
    ]
    return folded(
        "Plan",
        table(("", ""), facts),
        element("h2", "Parameters"),
        table(("name", "count", "shape", "dtype", "placement"), parameters),
        element("h2", "Collectives"),
        table(("operation", "axis", "ranks", "unit", "elements", "dtype", "calls"), collectives),
    )
