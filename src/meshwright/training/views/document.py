"""Write a run's page: its curves, a text sample, what was set, its events, plan and config."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from meshwright.core.config import to_dict
from meshwright.core.dtypes import bytes_text, count_text, duration_text
from meshwright.core.errors import ConfigError
from meshwright.training.config import Config
from meshwright.training.metrics import NAME
from meshwright.training.run.request import read_request

from .drawing import Axis, Curve, Figure, Html, document, element, folded, soft, table, tiles
from .history import ABSENT, BY_SOURCE, OF_PAIRS, History, RunState, Series, moment, over_steps, read_history, thinned

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
FORMS: dict[str, Callable[[float], str]] = {
    "plain": lambda value: f"{value:,.0f}" if 9999.5 <= abs(value) < 1e7 else f"{value:.4g}",
    "count": count_text,
    "bytes": lambda value: bytes_text(max(0, round(value))),
    "percent": lambda value: f"{100 * value:.3g} %",
}


@dataclass(frozen=True)
class Quantity:
    """A quantity of the metrics: the title of its figure, its unit, the form of its values (see ``Axis``), and the name
    of its curve on a run's page, where it has a figure.
    """

    title: str
    unit: str
    form: str = "plain"
    curve: str = ""

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
        "loss": Quantity("Loss", loss, curve="training"),
        "validation_loss": Quantity("Validation loss", loss),
        "tokens_per_second": Quantity("Speed", "tokens/s", "count", "tokens/s"),
        "memory_bytes": Quantity("Memory of rank 0", "bytes", "bytes", "memory"),
        "grad_norm": Quantity("Gradient norm", "no unit, L2 norm before clipping", curve="gradient norm"),
        "learning_rate": Quantity("Learning rate", "no unit", curve="learning rate"),
        "mfu": Quantity("Model FLOPs utilisation", "% of the peak", "percent", "MFU"),
        "tokens": Quantity("Tokens", "tokens", "count"),
    }


def placed(history: History, series: Series, by: str, most: int = MOST_POINTS) -> list[tuple[float, float]]:
    """Return at most so many points of a series over steps, tokens or seconds, without those of unknown place."""
    points = thinned(series, most)
    if by == "steps":
        return [*points]
    places = dict((history.clock if by == "seconds" else history.of("tokens")).points())
    return [(places[step], value) for step, value in points if step in places]


def curves_section(figures: Sequence[Figure]) -> list[str | Sequence[Figure]]:
    """Return figures beside each other, and what their vertical lines mean."""
    means = {"resume": "dashed, the run was continued there", "skipped": "dotted, a step was skipped"}
    note = "; ".join(means[kind] for kind in sorted({k for figure in figures for k, steps in figure.marks if steps}))
    lines = soft(f"Vertical lines: {note}.") if note else ""
    return [element("h2", "Curves"), lines, figures or element("p", "No step was taken yet.")]


def _figures(history: History) -> Iterator[Figure]:
    resumed = [event["step"] for event in history.events if event["event"] == "resume" and event["step"] > 0]
    marks = [("resume", resumed[-MOST_MARKS:]), ("skipped", history.rises("skipped")[:MOST_MARKS])]
    for name, one in quantities(history).items():
        labels = {name: one.curve} if one.curve else {}
        if name == "loss":
            labels |= {"validation_loss": "validation", **{key: key.removeprefix(BY_SOURCE) for key in history.sources}}
        drawn = [(label, history.series[key]) for key, label in labels.items() if key in history.series]
        if drawn:
            curves = [Curve(label, thinned(series, MOST_POINTS)) for label, series in drawn]
            yield Figure(one.title, curves, AXES["steps"], Axis(one.unit, one.form), marks)


# --- write a run's page


def page(folder: Path, config: Config, *, refresh: int = 0) -> str:
    """Return the run in ``folder`` as an HTML page.

    Args:
        refresh: seconds after which a browser reads the file again; 0: never.

    Raises:
        IntegrityError: a line of its metrics was not written by meshwright.
    """
    history = read_history(folder / NAME)
    state, known, last = RunState.of(folder, config, history), quantities(history), history.last
    again = f" · this page is read again every {refresh} s" if refresh else ""
    skipped, left = last("skipped"), state.time_left(history.clock)
    longest = max((len(series.steps) for series in history.series.values()), default=0)
    values = ("loss", "loss"), ("validation loss", "validation_loss"), ("trained on", "tokens")
    values += ("speed", "tokens_per_second"), ("memory of rank 0", "memory_bytes")
    figures = [
        ("progress", f"{state.step:,} of {state.steps:,} steps"),
        *((title, known[name].words(last(name))) for title, name in values),
        ("skipped", ABSENT if skipped is None else f"{skipped:,.0f} step{'s' * (skipped != 1)}"),
        ("time of training", duration_text(history.clock.last or 0.0)),
        *([("time left", left)] if left else []),
    ]
    thin = (
        f"Of curves with more than {MOST_POINTS:,} points (here up to {longest:,}) the extremes of equal portions are"
    )
    unseen = f"Validation losses of {len(history.left_out)} more sources are in the metrics and not drawn."
    sections = [
        element("h1", config.name),
        element("p", f"{state}{again}", class_=f"state {state.word}"),
        element("p", str(folder), Html("<br/>"), f"read on {moment(time.time())}", class_="soft path"),
        tiles(figures),
        soft(f"{thin} are drawn.") if longest > MOST_POINTS else "",
        soft(unseen) if history.left_out else "",
        *curves_section(list(_figures(history))),
        *_sample(history),
        *_set_keys(read_request(folder) or config, history),
        *_events(history),
        _plan(folder / "plan.json"),
        folded("Config", table(("key", "value"), [row[:2] for row in config_rows(config)])),
    ]
    return document(config.name, sections, refresh)


def _sample(history: History) -> list[str]:
    if (found := history.sample) is None:
        return []
    given = found.prompt if found.text.startswith(found.prompt) else ""
    note = f"Written by the weights of step {found.step:,}{'; marked: the prompt' * bool(given)}."
    marked = element("mark", printable(given)), printable(found.text[len(given) :])
    return [element("h2", "Sample"), soft(note), element("pre", *marked, class_="sample")]


def printable(text: str) -> str:
    """Return a text with its control characters escaped."""
    return "".join(c if c.isprintable() or c == "\n" else f"\\x{ord(c):02x}" for c in text.replace("\t", "    "))


def _events(history: History) -> list[str]:
    """Return events with their values: those of a start are seconds, and those of a memory report bytes."""
    units: dict[str, Callable[[Any], str]] = {"startup": duration_text, "memory": bytes_text}
    rows = []
    for event in history.events:
        text = units.get(str(event["event"]), lambda value: f"{value:.4g}" if isinstance(value, float) else str(value))
        details = ", ".join(
            f"{name} {str(value) if isinstance(value, bool) or not isinstance(value, int | float) else text(value)}"
            for name, value in event.items()
            if name not in ("event", "step", "time")
        )
        rows.append([moment(event.get("time")), str(event.get("step", "")), str(event["event"]), details[:2000]])
    dropped = soft(f"{history.dropped:,} earlier ones are in the metrics.") if history.dropped else ""
    return [element("h2", "Events"), dropped, table(("time", "step", "event", "details"), rows)] if rows else []


def _set_keys(config: Config, history: History) -> list[str]:
    """Return the keys that the user set to other values than the defaults, or changed when the run was continued."""
    known = {key: (shown, usual) for key, shown, usual in config_rows(config)}
    known |= {key: (over_steps(history.changes[key]), known.get(key, ("", ABSENT))[1]) for key in history.changes}
    rows = [[key, shown, usual] for key, (shown, usual) in known.items() if shown != usual]
    none = soft("Nothing: every key has its default.")
    return [element("h2", "Set for this run"), table(("key", "value", "default"), rows) if rows else none]


def config_rows(config: Config) -> Iterable[tuple[str, str, str]]:
    """Yield (key, value, default) of a config as text; a dash where a section is absent.

    The key of the run's own folder says nothing of its training, and is left out.
    """
    usual = dict(_leaves(to_dict(Config())))
    yield from ((key, value, usual.get(key, ABSENT)) for key, value in _leaves(to_dict(config)) if key != "run")


def _leaves(tree: Mapping[str, Any], path: str = "") -> Iterable[tuple[str, str]]:
    for key, value in tree.items():
        if isinstance(value, dict):
            yield from _leaves(value, f"{path}{key}.")
        else:
            yield f"{path}{key}", "none" if value is None else json.dumps(value, ensure_ascii=False, default=str)


def _plan(file: Path) -> str:
    """Return the run's plan as the command prints it; empty without one."""
    from meshwright.planning.plan import Plan  # it imports torch, which a comparison of runs does without

    if not file.is_file():
        return ""
    try:
        return folded("Plan", element("pre", str(Plan.from_json(file.read_text(encoding="utf-8", errors="replace")))))
    except ConfigError as error:
        return folded("Plan", element("p", f"{file.name} cannot be read: {error}"))
