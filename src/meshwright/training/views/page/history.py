"""Read a run's metrics as series of numbers, and tell whether it is being trained now, is complete, or was stopped."""

from __future__ import annotations

import math
import time
from array import array
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from meshwright.core.dtypes import duration_text
from meshwright.training.config import Config
from meshwright.training.metrics.metrics import metric_lines
from meshwright.training.run.occupancy import is_occupied

# --- read a run's metrics as series of numbers, once and in little memory

SAMPLE = "sample"
"""Event that holds a text which the run's model wrote."""
BEGIN = "begin"
"""Event of each start of a run, new or continued: its layout, and the keys whose values changed, each as ``change``."""
ABSENT, TO = "–", " → "


def change(was: str, now: str) -> str:
    """Return a key's change as text; both values as JSON text, or ABSENT."""
    return f"{was}{TO}{now}"


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
    "tokens",
    "skipped",
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
        layouts: first step and mesh of each part of the run that has another layout than the one before.
        changes: key -> its values in order, each with its first step; keys that kept their value are left out.
    """

    series: dict[str, Series] = field(default_factory=dict)
    events: list[dict[str, Any]] = field(default_factory=list)
    dropped: int = 0
    left_out: set[str] = field(default_factory=set)
    seconds: tuple[float, float] | None = None
    clock: Series = field(default_factory=Series)
    sample: TextSample | None = None
    layouts: list[tuple[int, str]] = field(default_factory=list)
    changes: dict[str, list[tuple[int, str]]] = field(default_factory=dict)

    @property
    def layout(self) -> str:
        """The layouts in words, with their steps where there are several; "" where the metrics name none."""
        return over_steps(self.layouts)

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
            prompt, text, history.sample = line.get("prompt"), line.get("text"), None
            if isinstance(step, int) and isinstance(text, str):
                history.sample = TextSample(step, prompt if isinstance(prompt, str) else "", text)
        elif line.get("event") == BEGIN:
            _begin(history, line)
        elif "event" in line:
            history.events.append(line)
            if len(history.events) > MOST_EVENTS:
                del history.events[0]
                history.dropped += 1
        elif isinstance(step, int) and 0 <= step < 2**53:
            if when is not None:
                history.clock.add(step, max(when - began, history.clock.last or 0.0))
            for name, value in line.items():
                if (number := _number(value)) is None or not (name in SINGLE or name.startswith(BY_SOURCE)):
                    continue
                if name in SINGLE or name in history.series or len(history.sources) < MOST_SOURCES:
                    history.series.setdefault(name, Series()).add(step, number)
                elif len(history.left_out) < MOST_EVENTS:
                    history.left_out.add(name)
    history.series = {name: series for name, series in history.series.items() if series.steps}
    return history


def _forget_after(history: History, step: int) -> None:
    for series in (*history.series.values(), history.clock):
        series.forget_after(step)
    if history.sample is not None and history.sample.step > step:
        history.sample = None
    history.events = [event for event in history.events if event.get("step", 0) <= step]
    for values in history.changes.values():  # the config keeps a change, whatever becomes of the steps after it
        values[:] = [
            *(one for one in values if one[0] <= step + 1),
            *((step + 1, v) for f, v in values[-1:] if f > step + 1),
        ]


def over_steps(values: Sequence[tuple[int, str]]) -> str:
    """Return values with the steps that each held for: ``"4 (to step 10), 2 (from step 11)"``; a single one alone."""
    words = []
    for place, (first, text) in enumerate(values):
        last = values[place + 1][0] - 1 if place + 1 < len(values) else 0
        steps = f"from step {first}" if first > 1 else ""
        if last:
            steps = f"step {first}" if first == last else f"steps {first} to {last}" if steps else f"to step {last}"
        words.append(f"{text} ({steps})" if steps else text)
    return ", ".join(words)


def _begin(history: History, line: dict[str, Any]) -> None:
    """Note the layout that a start has, and the keys that it changed; steps after it are taken anew."""
    first = line["step"] + 1 if isinstance(line.get("step"), int) else 1
    history.layouts = [known for known in history.layouts if known[0] < first]
    layout = str(line.get("layout", ""))
    if layout and layout != (history.layouts[-1][1] if history.layouts else ""):
        history.layouts.append((first, layout))
    for key, text in line.items():
        was, arrow, now = text.partition(TO) if isinstance(text, str) else ("", "", "")
        if arrow:
            known = history.changes.setdefault(key, [(1, was)])
            known[:] = [*(place for place in known if place[0] < first), (first, now)]


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
    number, values = len(series.steps), series.values
    kept = set(range(number)) if number <= most else {0, number - 1}
    portions = 0 if number <= most else max(1, (most - 2) // 3)
    for part in range(portions):
        places = range(part * number // portions, (part + 1) * number // portions)
        finite = [i for i in places if math.isfinite(values[i])]
        kept |= {min(finite, key=values.__getitem__), max(finite, key=values.__getitem__)} if finite else set()
        kept |= set([i for i in places if not math.isfinite(values[i])][:1])
    return [(series.steps[i], values[i]) for i in sorted(kept)]


# --- tell whether a run is being trained now, is complete, or was stopped

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
