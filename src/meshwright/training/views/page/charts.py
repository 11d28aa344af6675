"""Draw curves as SVG: axes, a path per series, marks at events."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from html import escape
from typing import Any

from .frame import legend

Point = tuple[int, float]

WIDTH, HEIGHT = 640, 260
LEFT, RIGHT, TOP, BOTTOM = 64, 28, 12, 28
COLOURS = 8
LOG_FROM = 1000.0
"""Positive values that differ by this factor or more are drawn on a logarithmic axis."""


@dataclass(frozen=True)
class Curve:
    """A series to draw. Values that are not finite are shown as crosses at the upper edge."""

    name: str
    points: Sequence[Point]


@dataclass(frozen=True)
class Chart:
    """A figure with one or more curves.

    Attributes:
        marks: (event, steps) that are drawn as vertical lines; "resume" and "skipped" have a style.
        text: formats a value at the axis and in the hover's text.
    """

    title: str
    curves: Sequence[Curve]
    text: Callable[[float], str]
    marks: Sequence[tuple[str, Sequence[int]]] = ()
    unit: str = ""
    """For the script that writes values on hover: "", "bytes", "percent" or "seconds"."""


@dataclass(frozen=True)
class ChartAxis:
    """Maps values to places; ``ticks`` are the values to write."""

    low: float
    high: float
    begins: float
    ends: float
    is_log: bool = False
    ticks: Sequence[float] = field(default=())

    def __call__(self, value: float) -> float:
        low, high, here = (math.log10(v) if self.is_log else v for v in (self.low, self.high, value))
        return self.begins + (here - low) / (high - low) * (self.ends - self.begins)


def step_axis(charts: Sequence[Chart]) -> ChartAxis:
    """Build one axis of steps for all charts, so that they can be compared."""
    steps = [point[0] for chart in charts for curve in chart.curves for point in curve.points]
    low, high = (min(steps), max(steps)) if steps else (0, 1)
    if low == high:
        low, high = low - 1, high + 1
    ticks = [tick for tick in nice(low, high, 8) if tick == int(tick)]
    return ChartAxis(low, high, LEFT, WIDTH - RIGHT, ticks=ticks)


def value_axis(chart: Chart) -> ChartAxis:
    """Build the value axis of a chart, around its finite values."""
    values = [value for curve in chart.curves for _, value in curve.points if math.isfinite(value)]
    low, high = (min(values), max(values)) if values else (0.0, 1.0)
    if low > 0 and high / low >= LOG_FROM:
        powers = range(math.ceil(math.log10(low)), math.floor(math.log10(high)) + 1)
        ticks = [10.0**power for power in powers][:: max(1, len(powers) // 6)]
        return ChartAxis(low, high, HEIGHT - BOTTOM, TOP, True, ticks)
    room = 0.05 * (high - low) or abs(high) * 0.05 or 1.0
    low, high = low - room, high + room
    unit = 1024.0 ** int(math.log(high, 1024)) if chart.unit == "bytes" and high > 1 else 1.0
    ticks = [min(max(tick * unit, low), high) for tick in nice(low / unit, high / unit, 5)]  # clamped: it rounds
    return ChartAxis(low, high, HEIGHT - BOTTOM, TOP, False, ticks)


def figure(chart: Chart, x: ChartAxis) -> str:
    """Return the chart as an HTML figure, readable without scripts."""
    y = value_axis(chart)
    title = chart.title + (" (logarithmic)" if y.is_log else "")
    parts = [_grid(x, y, chart.text)]
    parts += [_mark(what, x(step)) for what, steps in chart.marks for step in steps if x.low <= step <= x.high]
    parts += [_curve(curve, number % COLOURS, x, y) for number, curve in enumerate(chart.curves)]
    names = ((number % COLOURS, curve.name) for number, curve in enumerate(chart.curves))
    keys = legend(names) if len(chart.curves) > 1 else ""
    return (
        f'<figure><figcaption>{escape(title)}</figcaption>{keys}<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img"'
        f' aria-label="{escape(title)}">{"".join(parts)}<line class="cursor" y1="{TOP}"'
        f' y2="{HEIGHT - BOTTOM}"/></svg></figure>'
    )


def hover_data(chart: Chart, x: ChartAxis) -> dict[str, Any]:
    """Return the data that the script shows under the pointer: steps and values as drawn, null if not finite."""
    curves = [
        {
            "name": curve.name,
            "steps": [step for step, _ in curve.points],
            "values": [value if math.isfinite(value) else None for _, value in curve.points],
        }
        for curve in chart.curves
    ]
    return {"title": chart.title, "unit": chart.unit, "x": [x.low, x.high, x.begins, x.ends], "curves": curves}


def _curve(curve: Curve, colour: int, x: ChartAxis, y: ChartAxis) -> str:
    words, dots, crosses = [], [], []
    finite = [False, *(math.isfinite(value) for _, value in curve.points), False]
    for i, (step, value) in enumerate(curve.points, start=1):
        place = f"{x(step):.1f} "
        if not finite[i]:
            crosses.append(f"M{place}{TOP}m-3 -3l6 6m0 -6l-6 6")
            continue
        words.append(f"{'L' if finite[i - 1] else 'M'}{place}{y(value):.1f}")
        if not (finite[i - 1] or finite[i + 1]):
            dots.append(f"M{place}{y(value):.1f}h.01")
    drawn = f'<path class="curve c{colour}" data-name="{escape(curve.name)}" d="{"".join(words)}"/>'
    drawn += f'<path class="dots c{colour}" d="{"".join(dots)}"/>' if dots else ""
    return drawn + (f'<path class="broken" d="{"".join(crosses)}"><title>not finite</title></path>' if crosses else "")


def _grid(x: ChartAxis, y: ChartAxis, text: Callable[[float], str]) -> str:
    rows = "".join(
        f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y(v):.1f}" y2="{y(v):.1f}"/>'
        f'<text class="value" x="{LEFT - 6}" y="{y(v) + 4:.1f}">{escape(text(v))}</text>'
        for v in y.ticks
    )
    columns = "".join(f'<text class="step" x="{x(v):.1f}" y="{HEIGHT - 8}">{int(v):,}</text>' for v in x.ticks)
    return rows + columns


def _mark(what: str, place: float) -> str:
    kind = what if what in ("resume", "skipped") else "other"
    where = f'x1="{place:.1f}" x2="{place:.1f}" y1="{TOP}" y2="{HEIGHT - BOTTOM}"'
    return f'<line class="mark {kind}" {where}><title>{escape(what)}</title></line>'


def nice(low: float, high: float, count: int) -> list[float]:
    """Return about ``count`` round numbers in [low, high]."""
    raw = (high - low) / count
    if not 0 < raw < math.inf:
        return []
    power = 10.0 ** math.floor(math.log10(raw))
    if power == 0:
        return []
    size = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= raw)
    first = math.ceil(low / size)
    return [
        round(index * size, 12 - math.floor(math.log10(size))) for index in range(first, math.floor(high / size) + 1)
    ]
