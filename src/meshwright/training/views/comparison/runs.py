"""Read several runs as values that can stand beside each other: their figures, and the keys in which they differ."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from meshwright.core.errors import IntegrityError
from meshwright.core.files import read_object
from meshwright.training.config import Config
from meshwright.training.metrics.metrics import NAME
from meshwright.training.views.page.document import config_rows, shown_over_steps
from meshwright.training.views.page.drawing import placed
from meshwright.training.views.page.history import ABSENT, History, Series, read_history
from meshwright.training.views.page.state import RunState, state_of

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
