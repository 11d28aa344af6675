"""Read a run's metrics as series, tell whether it is trained now, complete or stopped, and write its page."""

from __future__ import annotations

import json
import math
import time
from array import array
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from meshwright.core.config import to_dict
from meshwright.core.dtypes import bytes_text, count_text, duration_text
from meshwright.core.errors import ConfigError
from meshwright.training.config import Config, leaves
from meshwright.training.metrics import NAME, metric_lines
from meshwright.training.run.occupancy import is_occupied
from meshwright.training.run.request import read_request
from meshwright.training.views.drawing import Axis, Curve, Figure, Html, document, element, folded, soft, table, tiles

# --- read a run's metrics as series of numbers, once and in little memory

SAMPLE = "sample"
"""Event that holds a text which the run's model wrote."""
BEGIN = "begin"
"""Event of each start of a run, new or continued: its layout, and the keys whose values changed, each as ``change``."""
ABSENT, TO = "–", " → "
OF_PAIRS = "rewards/margins"
"""A figure that only runs on pairs of answers have."""
SINGLE = (
    *("loss", "validation_loss", "tokens_per_second", "memory_bytes", "grad_norm", "learning_rate", "mfu", "tokens"),
    *("skipped", OF_PAIRS),
)
BY_SOURCE = "validation_loss/"
MOST_SOURCES = 12
MOST_EVENTS = 1000
LARGEST = 1e300
"""Larger numbers count as not finite, since no axis can be drawn for them."""
RECENT = 20
"""Number of last lines from which the speed of a live run follows."""


def change(was: str, now: str) -> str:
    """Return a key's change as text; both values as JSON text, or ABSENT."""
    return f"{was}{TO}{now}"


@dataclass
class Series:
    """A series of numbers over rising steps."""

    steps: array[int] = field(default_factory=lambda: array("q"))
    values: array[float] = field(default_factory=lambda: array("d"))

    def add(self, step: int, value: float) -> None:
        if not self.steps or step > self.steps[-1]:
            self.steps.append(step)
            self.values.append(value)

    def points(self) -> list[tuple[int, float]]:
        """Return (step, value) of the finite values."""
        return [(step, value) for step, value in zip(self.steps, self.values, strict=True) if math.isfinite(value)]

    @property
    def last(self) -> float | None:
        return self.values[-1] if self.values else None


class TextSample(NamedTuple):
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

    def of(self, name: str) -> Series:
        """Return a series; an empty one where there is none."""
        return self.series.get(name) or Series()

    def last(self, name: str) -> float | None:
        """Return the last value of a series, None where there is none."""
        return self.of(name).last

    def note(self, step: int, line: dict[str, Any]) -> None:
        """Add the figures of a step."""
        for name, value in line.items():
            if (number := _number(value)) is None or not (name in SINGLE or name.startswith(BY_SOURCE)):
                continue
            if name in SINGLE or name in self.series or len(self.sources) < MOST_SOURCES:
                self.series.setdefault(name, Series()).add(step, number)
            elif len(self.left_out) < MOST_EVENTS:
                self.left_out.add(name)

    def resume(self, step: int) -> None:
        """Drop the steps that a run abandoned when it continued from ``step``."""
        for series in (*self.series.values(), self.clock):
            end = bisect_right(series.steps, step)
            del series.steps[end:], series.values[end:]
        if self.sample is not None and self.sample.step > step:
            self.sample = None
        self.events = [event for event in self.events if event.get("step", 0) <= step]
        for values in self.changes.values():  # the config keeps a change, whatever becomes of the steps after it
            later = [(step + 1, value) for first, value in values[-1:] if first > step + 1]
            values[:] = [*(one for one in values if one[0] <= step + 1), *later]

    def begin(self, line: dict[str, Any]) -> None:
        """Note the layout that a start has, and the keys that it changed; steps after it are taken anew."""
        first = line["step"] + 1 if isinstance(line.get("step"), int) else 1
        self.layouts = [known for known in self.layouts if known[0] < first]
        layout = str(line.get("layout", ""))
        if layout and layout != (self.layouts[-1][1] if self.layouts else ""):
            self.layouts.append((first, layout))
        for key, text in line.items():
            was, arrow, now = text.partition(TO) if isinstance(text, str) else ("", "", "")
            if arrow:
                known = self.changes.setdefault(key, [(1, was)])
                known[:] = [*(place for place in known if place[0] < first), (first, now)]


def read_history(path: Path) -> History:
    """Read the history from a ``metrics.jsonl``; an empty one without a file.

    Raises:
        IntegrityError: a line of the file was not written by meshwright.
    """
    history, began = History(), None
    for line in metric_lines(path) if path.is_file() else ():
        when, step, event = _number(line.get("time")), line.get("step"), line.get("event")
        when = when if when is not None and math.isfinite(when) else None
        began = when if began is None else began
        if event == "resume":
            history.resume(line["step"])
            began = began if when is None else when - (history.clock.last or 0.0)
        if event == SAMPLE:
            prompt, text, history.sample = line.get("prompt"), line.get("text"), None
            if isinstance(step, int) and isinstance(text, str):
                history.sample = TextSample(step, prompt if isinstance(prompt, str) else "", text)
        elif event == BEGIN:
            history.begin(line)
        elif "event" in line:
            history.events.append(line)
            if len(history.events) > MOST_EVENTS:
                del history.events[0]
                history.dropped += 1
        elif isinstance(step, int) and 0 <= step < 2**53:
            if when is not None and began is not None:
                history.clock.add(step, max(when - began, history.clock.last or 0.0))
            history.note(step, line)
    history.series = {name: series for name, series in history.series.items() if series.steps}
    return history


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


class RunState(NamedTuple):
    """Where a run stands: its finished steps of all, and whether a job holds its folder now."""

    step: int
    steps: int
    is_live: bool

    @classmethod
    def of(cls, folder: Path, config: Config, history: History) -> RunState:
        """Return the state of the run in ``folder``."""
        step = max((series.steps[-1] for series in history.series.values()), default=0)
        return cls(step, config.steps, is_occupied(folder))

    @property
    def word(self) -> str:
        """``live``, ``complete`` or ``stopped``."""
        return "live" if self.is_live else "complete" if self.step >= self.steps else "stopped"

    def __str__(self) -> str:
        if self.word == "complete":
            return f"complete, {self.steps:,} steps"
        return f"{self.word} at step {self.step:,} of {self.steps:,}"

    def time_left(self, clock: Series) -> str:
        """Return how long a live run still takes, by its last steps; empty where that is not known."""
        if not self.is_live or len(clock.steps) < 2:
            return ""
        first = max(0, len(clock.steps) - RECENT)
        steps, seconds = clock.steps[-1] - clock.steps[first], clock.values[-1] - clock.values[first]
        return duration_text(max(0.0, seconds / max(steps, 1) * (self.steps - self.step)))


def moment(seconds: object) -> str:
    """Return a Unix time as date and time here; empty for what is none."""
    try:
        return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError, OSError):
        return ""


# --- write the page of a run

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
    skips = history.of("skipped")
    counts = zip(skips.steps, skips.values, (0.0, *skips.values), strict=False)
    skipped = [step for step, now, before in counts if now > before]
    marks = [("resume", resumed[-MOST_MARKS:]), ("skipped", skipped[:MOST_MARKS])]
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
    # keys that the user set to other values than the defaults, or changed when the run was continued
    keys = {key: (shown, usual) for key, shown, usual in config_rows(read_request(folder) or config)}
    keys |= {key: (over_steps(then), keys.get(key, ("", ABSENT))[1]) for key, then in history.changes.items()}
    changed = [[key, shown, usual] for key, (shown, usual) in keys.items() if shown != usual]
    sample = []
    if (found := history.sample) is not None:
        given = found.prompt if found.text.startswith(found.prompt) else ""
        note = f"Written by the weights of step {found.step:,}{'; marked: the prompt' * bool(given)}."
        marked = element("mark", printable(given)), printable(found.text[len(given) :])
        sample = [element("h2", "Sample"), soft(note), element("pre", *marked, class_="sample")]
    sections = [
        element("h1", config.name),
        element("p", f"{state}{again}", class_=f"state {state.word}"),
        element("p", str(folder), Html("<br/>"), f"read on {moment(time.time())}", class_="soft path"),
        tiles(figures),
        soft(f"{thin} are drawn.") if longest > MOST_POINTS else "",
        soft(unseen) if history.left_out else "",
        *curves_section(list(_figures(history))),
        *sample,
        element("h2", "Set for this run"),
        table(("key", "value", "default"), changed) if changed else soft("Nothing: every key has its default."),
        *_events(history),
        _plan(folder / "plan.json"),
        folded("Config", table(("key", "value"), [row[:2] for row in config_rows(config)])),
    ]
    return document(config.name, sections, refresh)


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


def config_rows(config: Config) -> Iterable[tuple[str, str, str]]:
    """Yield (key, value, default) of a config as text; a dash where a section is absent.

    The key of the run's own folder says nothing of its training, and is left out.
    """
    own, usual = (
        {key: "none" if value is None else json.dumps(value, ensure_ascii=False, default=str) for key, value in found}
        for found in (leaves(to_dict(config)), leaves(to_dict(Config())))
    )
    yield from ((key, value, usual.get(key, ABSENT)) for key, value in own.items() if key != "run")


def _plan(file: Path) -> str:
    """Return the run's plan as the command prints it; empty without one."""
    from meshwright.planning.plan import Plan  # it imports torch, which a comparison of runs does without

    if not file.is_file():
        return ""
    try:
        return folded("Plan", element("pre", str(Plan.from_json(file.read_text(encoding="utf-8", errors="replace")))))
    except ConfigError as error:
        return folded("Plan", element("p", f"{file.name} cannot be read: {error}"))
