"""Read a run's metrics as series of numbers, once and in little memory."""

from __future__ import annotations

import math
from array import array
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from meshwright.training.metrics.metrics import metric_lines

SAMPLE = "sample"
"""Event that holds a text which the run's model wrote."""

OF_PAIRS = "rewards/margins"
"""A figure that only runs on pairs of answers have."""

SINGLE = (
    "loss",
    "validation_loss",
    "tokens_per_second",
    "memory_bytes",
    "grad_norm",
    "learning_rate",
    "mfu",
    "own_time_max",
    "own_time_mean",
    "tokens",
    "skipped",
    "slowest_rank",
    OF_PAIRS,
)
BY_SOURCE = "validation_loss/"
MOST_SOURCES = 12
MOST_EVENTS = 1000
LARGEST = 1e300
"""Larger numbers count as not finite, since no axis can be drawn for them."""


@dataclass
class Series:
    """A series of numbers over rising steps."""

    steps: array[int] = field(default_factory=lambda: array("q"))
    values: array[float] = field(default_factory=lambda: array("d"))

    def add(self, step: int, value: float) -> None:
        if not self.steps or step > self.steps[-1]:
            self.steps.append(step)
            self.values.append(value)

    def forget_after(self, step: int) -> None:
        """Drop the steps that a run abandoned when it continued from ``step``."""
        end = bisect_right(self.steps, step)
        del self.steps[end:], self.values[end:]

    @property
    def last(self) -> float | None:
        return self.values[-1] if self.values else None


@dataclass(frozen=True)
class TextSample:
    """A text that the model wrote: the step of its weights, its beginning that was given, and the whole of it."""

    step: int
    prompt: str
    text: str


@dataclass
class History:
    """The metrics of a run, without abandoned steps.

    Attributes:
        series: name -> series, for the names in SINGLE and for validation losses by source.
        events: the last MOST_EVENTS lines without a step's figures; ``dropped`` counts earlier ones.
        left_out: validation sources beyond MOST_SOURCES.
        seconds: Unix time of the first line and of the last.
        clock: seconds of training at each step that has figures, since the first line; pauses between a stop and the
            next start, and steps that were abandoned, are left out.
        sample: the last text that the model wrote.
    """

    series: dict[str, Series] = field(default_factory=dict)
    events: list[dict[str, Any]] = field(default_factory=list)
    dropped: int = 0
    left_out: set[str] = field(default_factory=set)
    seconds: tuple[float, float] | None = None
    clock: Series = field(default_factory=Series)
    sample: TextSample | None = None

    @property
    def sources(self) -> list[str]:
        return [name for name in self.series if name.startswith(BY_SOURCE)]

    @property
    def step(self) -> int:
        """The last step that has figures; 0 without one."""
        return max((series.steps[-1] for series in self.series.values() if series.steps), default=0)

    def last(self, name: str) -> float | None:
        """Return the last value of a series, None where there is none."""
        return self.series[name].last if name in self.series else None

    def rises(self, name: str) -> list[int]:
        """Return the steps at which a count rose."""
        series, before, found = self.series.get(name, Series()), 0.0, []
        for step, value in zip(series.steps, series.values, strict=True):
            if value > before:
                found.append(step)
            before = value
        return found


def read_history(path: Path) -> History:
    """Read the history from a ``metrics.jsonl``; an empty one without a file.

    Raises:
        IntegrityError: a line of the file was not written by meshwright.
    """
    history, began = History(), 0.0
    for line in metric_lines(path) if path.is_file() else ():
        when, step = _number(line.get("time")), line.get("step")
        if when is not None and not math.isfinite(when):
            when = None
        if when is not None:
            began = when if history.seconds is None else began
            history.seconds = (history.seconds[0] if history.seconds else when, when)
        if line.get("event") == "resume":
            _forget_after(history, line["step"])
            began = began if when is None else when - (history.clock.last or 0.0)
        if line.get("event") == SAMPLE:
            history.sample = _sample(line)
        elif "event" in line:
            history.events.append(line)
            if len(history.events) > MOST_EVENTS:
                del history.events[0]
                history.dropped += 1
        elif isinstance(step, int) and 0 <= step < 2**53:
            if when is not None:
                history.clock.add(step, max(when - began, history.clock.last or 0.0))
            for name, value in line.items():
                if (number := _number(value)) is not None and _is_drawn(history, name):
                    history.series.setdefault(name, Series()).add(step, number)
    history.series = {name: series for name, series in history.series.items() if series.steps}
    return history


def _forget_after(history: History, step: int) -> None:
    for series in (*history.series.values(), history.clock):
        series.forget_after(step)
    if history.sample is not None and history.sample.step > step:
        history.sample = None
    history.events = [event for event in history.events if event.get("step", 0) <= step]


def _sample(line: dict[str, Any]) -> TextSample | None:
    step, prompt, text = (line.get(name) for name in ("step", "prompt", "text"))
    if not isinstance(step, int) or not isinstance(text, str):
        return None
    return TextSample(step, prompt if isinstance(prompt, str) else "", text)


def _is_drawn(history: History, name: str) -> bool:
    if name in SINGLE or name in history.series:
        return True
    if not name.startswith(BY_SOURCE):
        return False
    if len(history.sources) < MOST_SOURCES:
        return True
    if len(history.left_out) < MOST_EVENTS:
        history.left_out.add(name)
    return False


def _number(value: object) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        number = float(value)
    except OverflowError:
        return math.inf
    return number if abs(number) <= LARGEST or math.isnan(number) else math.copysign(math.inf, number)


def thinned(series: Series, most: int) -> list[tuple[int, float]]:
    """Thin a series to at most ``most`` points (8 or more) without losing a peak or a failure.

    Returns all points if they fit; else the first, the last, and the extremes and a non-finite point of equal portions.
    """
    points = list(zip(series.steps, series.values, strict=True)) if len(series.steps) <= most else None
    if points is not None:
        return points
    portions = max(1, (most - 2) // 3)
    kept = {0, len(series.steps) - 1}
    for part in range(portions):
        indexes = range(part * len(series.steps) // portions, (part + 1) * len(series.steps) // portions)
        kept |= _extremes(series.values, indexes)
    return [(series.steps[i], series.values[i]) for i in sorted(kept)]


def _extremes(values: Sequence[float], indexes: range) -> set[int]:
    finite = [i for i in indexes if math.isfinite(values[i])]
    kept = {min(finite, key=values.__getitem__), max(finite, key=values.__getitem__)} if finite else set()
    broken = next((i for i in indexes if not math.isfinite(values[i])), None)
    return kept if broken is None else kept | {broken}
