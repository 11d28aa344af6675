"""Choose what is drawn of a run's metrics: figures, their names, and the units of their axes."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from meshwright.core.units import bytes_text, count_text

from .charts import Chart, Curve, Point
from .history import BY_SOURCE, OF_PAIRS, History, Series, thinned

MOST_POINTS = 1500
"""Most points of a curve; a longer one is thinned."""
MOST_MARKS = 200


@dataclass(frozen=True)
class Quantity:
    """A quantity of the metrics, and how its values are written.

    Attributes:
        title: heads a figure of it.
        unit: beside the axis, and behind a value where the value has none of its own.
        text: formats a value.
        scale: as ``Chart`` has it.
    """

    title: str
    unit: str
    text: Callable[[float], str]
    scale: str = ""

    def words(self, value: float | None) -> str:
        """Return a value with its unit; a dash where there is none."""
        if value is None:
            return "–"
        if not math.isfinite(value):
            return str(value)
        return self.text(value) if self.scale or self.unit.startswith("no unit") else f"{self.text(value)} {self.unit}"


def plain(value: float) -> str:
    """Format a number with four digits, or whole where it has a few more."""
    return f"{value:,.0f}" if 9999.5 <= abs(value) < 1e7 else f"{value:.4g}"


def _bytes(value: float) -> str:
    return bytes_text(max(0, round(value)))


def quantities(history: History) -> dict[str, Quantity]:
    """Return the quantities of a run by their names in the metrics; a loss is of tokens, or of pairs of answers."""
    loss = "nats/pair" if OF_PAIRS in history.series else "nats/token"
    return {
        "loss": Quantity("Loss", loss, plain),
        "validation_loss": Quantity("Validation loss", loss, plain),
        "tokens_per_second": Quantity("Speed", "tokens/s", count_text),
        "memory_bytes": Quantity("Memory of rank 0", "bytes", _bytes, "bytes"),
        "grad_norm": Quantity("Gradient norm", "no unit, L2 norm before clipping", plain),
        "learning_rate": Quantity("Learning rate", "no unit", plain),
        "mfu": Quantity("Model FLOPs utilisation", "% of the peak", lambda value: f"{100 * value:.3g} %", "percent"),
        "own_time": Quantity("Own time of a step, of all ranks", "seconds", plain),
        "tokens": Quantity("Tokens", "tokens", count_text),
    }


def charts_of_run(history: History) -> list[Chart]:
    """Return the figures of one run over its steps; quantities that it does not have are left out."""
    known = quantities(history)
    by_source = {name: name.removeprefix(BY_SOURCE) for name in history.sources}
    wanted: list[tuple[str, dict[str, str]]] = [
        ("loss", {"loss": "training", "validation_loss": "validation", **by_source}),
        ("tokens_per_second", {"tokens_per_second": "tokens/s"}),
        ("memory_bytes", {"memory_bytes": "memory"}),
        ("grad_norm", {"grad_norm": "gradient norm"}),
        ("learning_rate", {"learning_rate": "learning rate"}),
        ("mfu", {"mfu": "MFU"}),
        ("own_time", {"own_time_max": "slowest rank", "own_time_mean": "mean"}),
    ]
    found = []
    for name, labels in wanted:
        curves = [
            Curve(label, thinned(history.series[key], MOST_POINTS))
            for key, label in labels.items()
            if key in history.series
        ]
        if curves:
            found.append(_chart(known[name], curves, _marks(history)))
    return found


COMPARED = ("loss", "validation_loss", "grad_norm", "learning_rate", "tokens_per_second")
"""Quantities whose curves are laid over each other."""


def charts_of_runs(runs: Mapping[str, History], by: str) -> list[Chart]:
    """Return figures with a curve for each run that has the quantity, over steps, tokens or seconds.

    A run has the same colour in all of them.
    """
    found = []
    for name in COMPARED:
        curves = [
            Curve(label, placed(history, history.series[name], by), colour)
            for colour, (label, history) in enumerate(runs.items())
            if name in history.series
        ]
        units = {known.unit: known for history in runs.values() if (known := quantities(history)[name])}
        if curves:
            quantity = next(iter(units.values()))
            unit = " or ".join(units)
            found.append(_chart(Quantity(quantity.title, unit, quantity.text, quantity.scale), curves))
    return found


def placed(history: History, series: Series, by: str, most: int = MOST_POINTS) -> list[Point]:
    """Return at most so many points of a series over steps, tokens or seconds, without those of unknown place."""
    points = thinned(series, most)
    if by == "steps":
        return list(points)
    over = history.clock if by == "seconds" else history.series.get("tokens", Series())
    places = dict(zip(over.steps, over.values, strict=True))
    return [(places[step], value) for step, value in points if math.isfinite(places.get(step, math.nan))]


def _chart(quantity: Quantity, curves: Sequence[Curve], marks: Sequence[tuple[str, Sequence[float]]] = ()) -> Chart:
    return Chart(quantity.title, curves, quantity.text, marks, quantity.unit, quantity.scale)


def _marks(history: History) -> list[tuple[str, Sequence[float]]]:
    resumed = [event["step"] for event in history.events if event["event"] == "resume" and event["step"] > 0]
    return [("resume", resumed[-MOST_MARKS:]), ("skipped", history.rises("skipped")[:MOST_MARKS])]
