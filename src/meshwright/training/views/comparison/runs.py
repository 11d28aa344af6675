"""Read several runs as values that can stand beside each other, and write what they came to as rows."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from meshwright.core.dtypes import count_text, duration_text
from meshwright.core.errors import IntegrityError
from meshwright.core.files import read_object
from meshwright.training.config import Config
from meshwright.training.metrics.metrics import NAME
from meshwright.training.views.page.charts import placed, quantities
from meshwright.training.views.page.document import config_rows, shown_over_steps
from meshwright.training.views.page.history import ABSENT, History, RunState, Series, read_history, state_of

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

    @property
    def best(self) -> tuple[int, float] | None:
        """The step of the lowest training loss, and that loss."""
        return lowest(self.history.series.get("loss"))

    @property
    def best_validation(self) -> tuple[int, float] | None:
        """The step of the lowest validation loss, and that loss."""
        return lowest(self.history.series.get("validation_loss"))

    @property
    def speed(self) -> float | None:
        """Median of the tokens per second."""
        found = self.history.series.get("tokens_per_second")
        values = [value for value in found.values if math.isfinite(value)] if found else []
        return median(values) if values else None

    @property
    def memory(self) -> float | None:
        """Highest memory of rank 0, in bytes."""
        found = self.history.series.get("memory_bytes")
        return max(found.values, default=None) if found else None


def lowest(series: Series | None) -> tuple[int, float] | None:
    """Return (step, value) of a series' lowest finite value; None where there is none."""
    points = zip(series.steps, series.values, strict=True) if series else ()
    return min(((step, value) for step, value in points if math.isfinite(value)), key=lambda at: at[1], default=None)


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
        {key: shown_over_steps(run.history, key, shown) for key, shown, _ in config_rows(run.config)} for run in runs
    ]
    keys = dict.fromkeys(key for rows in known for key in rows)
    rows = [(key, [one.get(key, ABSENT) for one in known]) for key in keys]
    return [(key, values) for key, values in rows if len(set(values)) > 1]


# --- write what runs came to as rows of text, for a terminal and a page, and as values for programs


def rows(runs: Sequence[ComparedRun], by: str) -> list[tuple[str, list[str]]]:
    """Return (figure, its text for each run), with units; rows that no run has are left out."""
    found: list[tuple[str, list[str]]] = [("state", [run.state.word for run in runs])]
    found.append(("steps", [f"{run.state.step:,} of {run.state.steps:,}" for run in runs]))
    found.append(("final loss", [_of(run, "loss", run.history.last("loss")) for run in runs]))
    found += _best("best loss", "loss", runs, [run.best for run in runs])
    place = common_place(runs, by)
    if place is not None:
        found.append((f"loss at {_place(place, by)}", [_of(run, "loss", loss_at(run, place, by)) for run in runs]))
    last = [_of(run, "validation_loss", run.history.last("validation_loss")) for run in runs]
    found.append(("validation loss", last))
    found += _best("best validation loss", "validation_loss", runs, [run.best_validation for run in runs])
    found.append(("trained on", [_of(run, "tokens", run.history.last("tokens")) for run in runs]))
    found.append(("time of training", [_seconds(run) for run in runs]))
    found.append(("median speed", [_of(run, "tokens_per_second", run.speed) for run in runs]))
    found.append(("most memory of rank 0", [_of(run, "memory_bytes", run.memory) for run in runs]))
    found.append(("MFU", [_of(run, "mfu", run.history.last("mfu")) for run in runs]))
    found.append(("skipped steps", [_skipped(run) for run in runs]))
    found.append(("layout", [run.layout for run in runs]))
    return [(name, texts) for name, texts in found if set(texts) != {ABSENT}]


def _of(run: ComparedRun, name: str, value: float | None) -> str:
    return quantities(run.history)[name].words(value)


def _best(
    title: str, name: str, runs: Sequence[ComparedRun], found: Sequence[tuple[int, float] | None]
) -> list[tuple[str, list[str]]]:
    """Return two rows: the lowest loss of each run, and its step."""
    values = [_of(run, name, best and best[1]) for run, best in zip(runs, found, strict=True)]
    return [(title, values), (f"step of {title}", [ABSENT if best is None else f"{best[0]:,}" for best in found])]


def _seconds(run: ComparedRun) -> str:
    return ABSENT if run.history.clock.last is None else duration_text(run.history.clock.last)


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


def _skipped(run: ComparedRun) -> str:
    skipped = run.history.last("skipped")
    return f"{skipped:,.0f}" if skipped else ABSENT


def _place(place: float, by: str) -> str:
    if by == "tokens":
        return f"{count_text(place)} tokens"
    return duration_text(place) if by == "seconds" else f"step {place:,.0f}"


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
    last = run.history.last
    best, validation = run.best, run.best_validation
    figures = {
        "loss": last("loss"),
        "best_loss": best and best[1],
        "best_loss_step": best and best[0],
        "loss_at_common": at_common,
        "validation_loss": last("validation_loss"),
        "best_validation_loss": validation and validation[1],
        "best_validation_loss_step": validation and validation[0],
        "tokens": _whole(last("tokens")),
        "seconds": None if run.history.clock.last is None else round(run.history.clock.last, 3),
        "tokens_per_second": run.speed,
        "memory_bytes": _whole(run.memory),
        "mfu": last("mfu"),
        "skipped": _whole(last("skipped")),
    }
    facts = {"run": str(run.folder), "label": run.label, "state": run.state.word}
    facts |= {"step": run.state.step, "steps": run.state.steps, "layout": run.layout}
    return facts | {name: value if _is_number(value) else None for name, value in figures.items()}


def _whole(value: float | None) -> float | None:
    return int(value) if _is_number(value) and value is not None else value


def _is_number(value: float | None) -> bool:
    return value is not None and math.isfinite(value)
