"""Tell whether a run is being trained now, is complete, or was stopped."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

from meshwright.core.units import duration_text
from meshwright.training.config import Config
from meshwright.training.run.occupancy import is_occupied

from .history import History

RECENT = 20
"""Number of last lines from which the speed of a live run follows."""


@dataclass(frozen=True)
class RunState:
    """Where a run stands: its finished steps of all, and whether a job holds its folder now."""

    step: int
    steps: int
    is_live: bool

    @property
    def word(self) -> str:
        """``live``, ``complete`` or ``stopped``."""
        return "live" if self.is_live else "complete" if self.step >= self.steps else "stopped"

    def __str__(self) -> str:
        if self.word == "complete":
            return f"complete, {self.steps:,} steps"
        return f"{self.word} at step {self.step:,} of {self.steps:,}"


def state_of(folder: Path, config: Config, history: History) -> RunState:
    """Return the state of the run in ``folder``."""
    return RunState(history.step, config.steps, is_occupied(folder))


def time_left(state: RunState, history: History) -> str:
    """Return how long a live run still takes, by its last steps; empty where that is not known."""
    clock = history.clock
    if not state.is_live or len(clock.steps) < 2:
        return ""
    first = max(0, len(clock.steps) - RECENT)
    steps, seconds = clock.steps[-1] - clock.steps[first], clock.values[-1] - clock.values[first]
    return duration_text(max(0.0, seconds / max(steps, 1) * (state.steps - state.step)))


def moment(seconds: object) -> str:
    """Return a Unix time as date and time here; empty for what is none."""
    try:
        return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError, OSError):
        return ""
