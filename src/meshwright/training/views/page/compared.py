"""Lay runs beside each other, as rows of text, as values for programs and as a page. Torch-free."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from meshwright.core.dtypes import duration_text
from meshwright.core.errors import IntegrityError
from meshwright.core.files import read_object
from meshwright.training.config import Config
from meshwright.training.metrics.metrics import NAME

from .document import AXES, config_rows, curves_section, placed, quantities
from .drawing import COLOURS, Axis, Curve, Figure, Html, document, element, soft, table
from .history import ABSENT, History, RunState, Series, moment, over_steps, read_history, state_of

# --- read several runs as values that can stand beside each other

FEWEST, MOST = 2, 8


@dataclass(frozen=True)
class ComparedRun:
    """A run to compare.

    Attributes:
        label: its folder's name, or its path where two have the same name.
        layout: the mesh, each with its steps if there were several; without a word in the metrics, that of its plan.
    """

    label: str
    folder: Path
    config: Config
    history: History
    state: RunState
    layout: str


def _best(name: str, place: int) -> Callable[[ComparedRun], float | None]:
    """Return a function for the step (place 0) of a series' lowest finite value, or that value (place 1)."""

    def best(run: ComparedRun) -> float | None:
        series = run.history.series.get(name, Series())
        points = (at for at in zip(series.steps, series.values, strict=True) if math.isfinite(at[1]))
        found = min(points, key=lambda at: at[1], default=None)
        return None if found is None else found[place]

    return best


def _last(name: str) -> Callable[[ComparedRun], float | None]:
    return lambda run: run.history.last(name)


def _speed(run: ComparedRun) -> float | None:
    series = run.history.series.get("tokens_per_second", Series())
    values = [value for value in series.values if math.isfinite(value)]
    return median(values) if values else None


FIGURES: dict[str, tuple[str, str, Callable[[ComparedRun], float | None]]] = {
    "loss": ("final loss", "loss", _last("loss")),
    "best_loss": ("best loss", "loss", _best("loss", 1)),
    "best_loss_step": ("step of best loss", "steps", _best("loss", 0)),
    "loss_at_common": ("loss at", "loss", lambda run: None),
    "validation_loss": ("validation loss", "loss", _last("validation_loss")),
    "best_validation_loss": ("best validation loss", "loss", _best("validation_loss", 1)),
    "best_validation_loss_step": ("step of best validation loss", "steps", _best("validation_loss", 0)),
    "tokens": ("trained on", "tokens", _last("tokens")),
    "seconds": ("time of training", "seconds", lambda run: run.history.clock.last),
    "tokens_per_second": ("median speed", "tokens_per_second", _speed),
    "memory_bytes": (
        "most memory of rank 0",
        "memory_bytes",
        lambda run: max(run.history.series.get("memory_bytes", Series()).values, default=None),
    ),
    "mfu": ("MFU", "mfu", _last("mfu")),
    "skipped": ("skipped steps", "steps", lambda run: run.history.last("skipped")),
}
"""Figure of a run for programs -> (its title for readers, its quantity, its value)."""


def read_run(folder: Path, config: Config, label: str) -> ComparedRun:
    """Read a run as it stands now, also while it is written.

    Raises:
        IntegrityError: a line of its metrics was not written by meshwright.
    """
    history = read_history(folder / NAME)
    layout = history.layout or _layout(folder, config)
    return ComparedRun(label, folder, config, history, state_of(folder, config, history), layout)


def _layout(folder: Path, config: Config) -> str:
    """Return the mesh in words, as ``dp_shard=2 × tp=2``; axes of one rank are left out."""
    try:
        plan = read_object(folder / "plan.json")  # as JSON: the class imports torch, which takes seconds
        axes = [(str(axis), int(size)) for axis, size in plan["mesh"]]
        axes += [("ep", int(plan["experts"]["ranks"]))] if plan.get("experts") else []
    except (OSError, IntegrityError, KeyError, TypeError, ValueError):
        return str(config.layout)
    return " × ".join(f"{axis}={size}" for axis, size in axes if size > 1) or "one process"


def labels_of(folders: Sequence[Path]) -> list[str]:
    """Return a name for each folder: its last part, or the whole path where that is not its own."""
    names = [folder.resolve().name for folder in folders]
    return [name if names.count(name) == 1 else str(folder) for name, folder in zip(names, folders, strict=True)]


def letter_of(number: int) -> str:
    """Return the letter that stands for a run in tables: A, B, …"""
    return chr(ord("A") + number)


def common_place(runs: Sequence[ComparedRun], by: str) -> float | None:
    """Return the place (step, tokens or seconds) that every run with a loss has reached; None with fewer than two."""
    ends = [points[-1][0] for run in runs if (points := _losses(run, by))]
    return min(ends) if len(ends) > 1 else None


def loss_at(run: ComparedRun, place: float, by: str) -> float | None:
    """Return a run's last training loss at or before a place; None where there is none."""
    before = [value for at, value in _losses(run, by) if at <= place]
    return before[-1] if before else None


def _losses(run: ComparedRun, by: str) -> list[tuple[float, float]]:
    series = run.history.series.get("loss")
    return placed(run.history, series, by, most=len(series.steps)) if series else []


def differences(runs: Sequence[ComparedRun]) -> list[tuple[str, list[str]]]:
    """Return (key, its value in each run) of the keys of the configs that are not the same in all runs."""
    known = [
        {key: over_steps(run.history.changes.get(key, [(1, shown)])) for key, shown, _ in config_rows(run.config)}
        for run in runs
    ]
    keys = dict.fromkeys(key for rows in known for key in rows)
    rows = [(key, [one.get(key, ABSENT) for one in known]) for key in keys]
    return [(key, values) for key, values in rows if len(set(values)) > 1]


# --- write what runs came to as rows of text, for a terminal and a page, and as values for programs


def rows(runs: Sequence[ComparedRun], by: str) -> list[tuple[str, list[str]]]:
    """Return (figure, its text for each run), with units; rows that no run has are left out."""
    found: list[tuple[str, list[str]]] = [("state", [run.state.word for run in runs])]
    found.append(("steps", [f"{run.state.step:,} of {run.state.steps:,}" for run in runs]))
    place = common_place(runs, by)
    for key, (title, quantity, value) in FIGURES.items():
        values = [value(run) for run in runs]
        if key == "loss_at_common" and place is not None:
            whole = f"step {place:,.0f}" if by == "steps" else _text(runs[0], by, place)
            title, values = f"{title} {whole}", [loss_at(run, place, by) for run in runs]
        texts = [_text(run, quantity, one) for run, one in zip(runs, values, strict=True)]
        found.append((title, [ABSENT if key == "skipped" and text == "0" else text for text in texts]))
    found.append(("layout", [run.layout for run in runs]))
    return [(name, texts) for name, texts in found if set(texts) != {ABSENT}]


def _text(run: ComparedRun, quantity: str, value: float | None) -> str:
    if value is None:
        return ABSENT
    if quantity in ("steps", "seconds"):
        return f"{value:,.0f}" if quantity == "steps" else duration_text(value)
    return quantities(run.history)[quantity].words(value)


def narrowed(found: Sequence[tuple[str, list[str]]]) -> list[tuple[str, list[str]]]:
    """Return rows for a terminal: a unit that all values share stands in the head, once."""
    narrow = []
    for name, texts in found:
        units = {text.partition(" ")[2] for text in texts if text != ABSENT}
        unit = units.pop() if len(units) == 1 else ""
        if unit and not any(character.isdigit() for character in unit):
            name, texts = f"{name}, {unit}", [text.partition(" ")[0] for text in texts]
        narrow.append((name, texts))
    return narrow


def to_dict(runs: Sequence[ComparedRun], by: str) -> dict[str, Any]:
    """Return the comparison as JSON values: figures in plain units (nats, tokens, seconds, bytes), null if unknown."""
    place = common_place(runs, by)
    return {
        "by": by,
        "common": place,
        "runs": [_values(run, None if place is None else loss_at(run, place, by)) for run in runs],
        "differences": {
            key: {run.label: value for run, value in zip(runs, values, strict=True)}
            for key, values in differences(runs)
        },
    }


def _values(run: ComparedRun, at_common: float | None) -> dict[str, Any]:
    figures = {key: value(run) for key, (_, _, value) in FIGURES.items()} | {"loss_at_common": at_common}
    known = {key: value if value is not None and math.isfinite(value) else None for key, value in figures.items()}
    known |= {key: int(value) for key in ("tokens", "memory_bytes", "skipped") if (value := known[key]) is not None}
    facts = {"run": str(run.folder), "label": run.label, "state": run.state.word}
    facts |= {"step": run.state.step, "steps": run.state.steps, "layout": run.layout}
    return facts | known | {"seconds": known["seconds"] and round(known["seconds"], 3)}


# --- write runs beside each other as a page

MOST_NAMED = 3
"""Most runs whose names stand beside each figure; of more, their letters do."""
COMPARED = ("loss", "validation_loss", "grad_norm", "learning_rate", "tokens_per_second")
"""Quantities whose curves are laid over each other."""


def comparison_page(runs: Sequence[ComparedRun], by: str) -> str:
    """Return the page of several runs, over steps, tokens or seconds; a run has the same colour in all figures."""
    letters = [letter_of(number) for number in range(len(runs))]
    config, figures = (
        table((head, *letters), [(name, *texts) for name, texts in found], kind="letters")
        for head, found in (("key", differences(runs)), ("figure", rows(runs, by)))
    )
    title = f"{len(runs)} runs compared"
    sections = [
        element("h1", title),
        soft(f"read on {moment(time.time())}"),
        element("ul", *(_run(number, run) for number, run in enumerate(runs)), class_="runs"),
        element("h2", "Figures"),
        figures,
        *curves_section(_figures(runs, by)),
        element("h2", "What differs in their configs"),
        config if differences(runs) else soft("Nothing: their configs are the same."),
    ]
    return document(title, sections)


def _run(number: int, run: ComparedRun) -> Html:
    line = Html("<br/>")
    state = element("span", str(run.state), class_=f"state {run.state.word}")
    name, folder = element("b", f"{letter_of(number)} {run.label}"), element("span", str(run.folder), class_="soft")
    return element("li", name, line, state, line, folder, class_=f"c{number % COLOURS}")


def _figures(runs: Sequence[ComparedRun], by: str) -> list[Figure]:
    found = []
    for key in COMPARED:
        has = [(number, run) for number, run in enumerate(runs) if key in run.history.series]
        curves = [
            Curve(
                f"{letter_of(number)} {run.label}" if len(runs) <= MOST_NAMED else letter_of(number),
                placed(run.history, run.history.series[key], by),
                colour=number,
            )
            for number, run in has
        ]
        known = [quantities(run.history)[key] for _, run in has]
        if known:
            units = " or ".join(dict.fromkeys(one.unit for one in known))
            found.append(Figure(known[0].title, curves, AXES[by], Axis(units, known[0].form)))
    return found
