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
from meshwright.training.metrics import NAME
from meshwright.training.views.drawing import COLOURS, Axis, Curve, Figure, Html, document, element, soft, table
from meshwright.training.views.page import (
    ABSENT,
    AXES,
    History,
    RunState,
    config_rows,
    curves_section,
    moment,
    over_steps,
    placed,
    quantities,
    read_history,
)

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

    @classmethod
    def read(cls, folder: Path, config: Config, label: str) -> ComparedRun:
        """Read a run as it stands now, also while it is written.

        Raises:
            IntegrityError: a line of its metrics was not written by meshwright.
        """
        history = read_history(folder / NAME)
        layout = history.layout
        if not layout:
            try:
                plan = read_object(folder / "plan.json")  # as JSON: the class imports torch, which takes seconds
                axes = [(str(axis), int(size)) for axis, size in plan["mesh"]]
                axes += [("ep", int(plan["experts"]["ranks"]))] if plan.get("experts") else []
                layout = " × ".join(f"{axis}={size}" for axis, size in axes if size > 1) or "one process"
            except (OSError, IntegrityError, KeyError, TypeError, ValueError):
                layout = str(config.layout)
        return cls(label, folder, config, history, RunState.of(folder, config, history), layout)

    def losses(self, by: str) -> list[tuple[float, float]]:
        """Return (place, training loss) over steps, tokens or seconds."""
        series = self.history.of("loss")
        return placed(self.history, series, by, most=len(series.steps))

    def loss_at(self, place: float | None, by: str) -> float | None:
        """Return the last training loss at or before a place; None where there is none."""
        before = [value for at, value in self.losses(by) if place is not None and at <= place]
        return before[-1] if before else None


Value = Callable[[History], float | None]


def _best(name: str, place: int) -> Value:
    """Return a function for the step (place 0) of a series' lowest finite value, or that value (place 1)."""
    return lambda history: min(history.of(name).points(), key=lambda at: at[1], default=(None, None))[place]


FIGURES: dict[str, tuple[str, str, Value]] = {
    "loss": ("final loss", "loss", lambda history: history.last("loss")),
    "best_loss": ("best loss", "loss", _best("loss", 1)),
    "best_loss_step": ("step of best loss", "steps", _best("loss", 0)),
    "loss_at_common": ("loss at", "loss", lambda history: None),
    "validation_loss": ("validation loss", "loss", lambda history: history.last("validation_loss")),
    "best_validation_loss": ("best validation loss", "loss", _best("validation_loss", 1)),
    "best_validation_loss_step": ("step of best validation loss", "steps", _best("validation_loss", 0)),
    "tokens": ("trained on", "tokens", lambda history: history.last("tokens")),
    "seconds": ("time of training", "seconds", lambda history: history.clock.last),
    "tokens_per_second": (
        "median speed",
        "tokens_per_second",
        lambda history: median([value for _, value in history.of("tokens_per_second").points()] or [math.nan]),
    ),
    "memory_bytes": (
        "most memory of rank 0",
        "memory_bytes",
        lambda history: max(history.of("memory_bytes").values, default=None),
    ),
    "mfu": ("MFU", "mfu", lambda history: history.last("mfu")),
    "skipped": ("skipped steps", "steps", lambda history: history.last("skipped")),
}
"""Figure of a run for programs -> (its title for readers, its quantity, its value)."""


def labels_of(folders: Sequence[Path]) -> list[str]:
    """Return a name for each folder: its last part, or the whole path where that is not its own."""
    names = [folder.resolve().name for folder in folders]
    return [name if names.count(name) == 1 else str(folder) for name, folder in zip(names, folders, strict=True)]


def letter_of(number: int) -> str:
    """Return the letter that stands for a run in tables: A, B, …"""
    return chr(ord("A") + number)


def common_place(runs: Sequence[ComparedRun], by: str) -> float | None:
    """Return the place (step, tokens or seconds) that every run with a loss has reached; None with fewer than two."""
    ends = [points[-1][0] for run in runs if (points := run.losses(by))]
    return min(ends) if len(ends) > 1 else None


def differences(runs: Sequence[ComparedRun]) -> list[tuple[str, list[str]]]:
    """Return (key, its value in each run) of the keys of the configs that are not the same in all runs."""
    known = [
        {key: over_steps(run.history.changes.get(key, [(1, shown)])) for key, shown, _ in config_rows(run.config)}
        for run in runs
    ]
    rows = {key: [one.get(key, ABSENT) for one in known] for found in known for key in found}
    return [(key, values) for key, values in rows.items() if len(set(values)) > 1]


# --- write what runs came to as rows of text, for a terminal and a page, and as values for programs


def rows(runs: Sequence[ComparedRun], by: str) -> list[tuple[str, list[str]]]:
    """Return (figure, its text for each run), with units; rows that no run has are left out."""

    def text(run: ComparedRun, quantity: str, value: float | None) -> str:
        if value is None or math.isnan(value):
            return ABSENT if value is None or quantity == "tokens_per_second" else str(value)
        if quantity in ("steps", "seconds"):
            return f"{value:,.0f}" if quantity == "steps" else duration_text(value)
        return quantities(run.history)[quantity].words(value)

    found: list[tuple[str, list[str]]] = [("state", [run.state.word for run in runs])]
    found.append(("steps", [f"{run.state.step:,} of {run.state.steps:,}" for run in runs]))
    place = common_place(runs, by)
    for key, (title, quantity, value) in FIGURES.items():
        values = [value(run.history) for run in runs]
        if key == "loss_at_common" and place is not None:
            title += f" step {place:,.0f}" if by == "steps" else f" {text(runs[0], by, place)}"
            values = [run.loss_at(place, by) for run in runs]
        texts = [text(run, quantity, one) for run, one in zip(runs, values, strict=True)]
        found.append((title, [ABSENT if key == "skipped" and text == "0" else text for text in texts]))
    found.append(("layout", [run.layout for run in runs]))
    return [(name, texts) for name, texts in found if set(texts) != {ABSENT}]


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
    place, found = common_place(runs, by), []
    for run in runs:
        figures = {key: value(run.history) for key, (_, _, value) in FIGURES.items()}
        figures |= {"loss_at_common": run.loss_at(place, by)}
        known = {key: value if value is not None and math.isfinite(value) else None for key, value in figures.items()}
        whole = ("tokens", "memory_bytes", "skipped")
        known |= {key: int(value) for key in whole if (value := known[key]) is not None}
        facts = {"run": str(run.folder), "label": run.label, "state": run.state.word}
        facts |= {"step": run.state.step, "steps": run.state.steps, "layout": run.layout}
        found.append(facts | known | {"seconds": known["seconds"] and round(known["seconds"], 3)})
    labels = [run.label for run in runs]
    differing = {key: dict(zip(labels, values, strict=True)) for key, values in differences(runs)}
    return {"by": by, "common": place, "runs": found, "differences": differing}


# --- write runs beside each other as a page

MOST_NAMED = 3
"""Most runs whose names stand beside each figure; of more, their letters do."""
COMPARED = ("loss", "validation_loss", "grad_norm", "learning_rate", "tokens_per_second")
"""Quantities whose curves are laid over each other."""


def comparison_page(runs: Sequence[ComparedRun], by: str) -> str:
    """Return the page of several runs, over steps, tokens or seconds; a run has the same colour in all figures."""
    letters = [letter_of(number) for number in range(len(runs))]
    named = [f"{letter} {run.label}" for letter, run in zip(letters, runs, strict=True)]
    heads, line = [], Html("<br/>")
    for number, run in enumerate(runs):
        state = element("span", str(run.state), class_=f"state {run.state.word}")
        folder = element("span", str(run.folder), class_="soft")
        parts = element("b", named[number]), line, state, line, folder
        heads.append(element("li", *parts, class_=f"c{number % COLOURS}"))
    figures = []
    for key in COMPARED:
        has = [(number, run) for number, run in enumerate(runs) if key in run.history.series]
        curves = [
            Curve(
                (named if len(runs) <= MOST_NAMED else letters)[number],
                placed(run.history, run.history.series[key], by),
                colour=number,
            )
            for number, run in has
        ]
        known = [quantities(run.history)[key] for _, run in has]
        if known:
            units = " or ".join(dict.fromkeys(one.unit for one in known))
            figures.append(Figure(known[0].title, curves, AXES[by], Axis(units, known[0].form)))
    config, values = (
        table((head, *letters), [(name, *texts) for name, texts in found], kind="letters")
        for head, found in (("key", differences(runs)), ("figure", rows(runs, by)))
    )
    title = f"{len(runs)} runs compared"
    sections = [
        element("h1", title),
        soft(f"read on {moment(time.time())}"),
        element("ul", *heads, class_="runs"),
        element("h2", "Figures"),
        values,
        *curves_section(figures),
        element("h2", "What differs in their configs"),
        config if differences(runs) else soft("Nothing: their configs are the same."),
    ]
    return document(title, sections)
