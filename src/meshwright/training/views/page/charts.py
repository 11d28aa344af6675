"""Choose figures of a run, draw their curves as SVG, and put a page together: one HTML file that fetches nothing."""

from __future__ import annotations

import base64
import hashlib
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from importlib import resources
from typing import Any

from meshwright.core.dtypes import bytes_text, count_text

from .history import BY_SOURCE, OF_PAIRS, History, Series, thinned

# --- put a page together

_LONG = re.compile(r"\S{16,}")
_BREAKS = re.compile(r"(?<=[/_=:-])(?=\w)|(?<=\.)(?=[A-Za-z_])")


def framed(title: str, body: Sequence[str], *, script: str = "", data: str = "", refresh: int = 0) -> str:
    """Return a page as text.

    Args:
        title: of the window, without the product's name.
        body: elements as HTML, in order.
        script: JavaScript that may run; everything has to be readable without.
        data: JSON for the script.
        refresh: seconds after which a browser reads the file again; 0: never.
    """
    style = asset("page.css")
    policy = f"default-src 'none'; img-src data:; style-src {_fingerprint(style)}"
    ending = ""
    again = f'<meta http-equiv="refresh" content="{refresh}"/>\n' if refresh else ""
    if script:
        policy += f"; script-src {_fingerprint(script)}"
        # "<" would end the script element; the rest is JSON as it stands
        data = data.replace("<", "\\u003c")
        ending = f'<script type="application/json" id="data">{data}</script>\n<script>{script}</script>\n'
    return (
        f'<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8"/>\n'
        f'<meta http-equiv="Content-Security-Policy" content="{escape(policy)}"/>\n'
        f"{again}"
        f'<meta name="viewport" content="width=device-width, initial-scale=1"/>\n<title>{escape(title)} ·'
        f" meshwright</title>\n"
        f'<link rel="icon" href="data:,"/>\n<style>{style}</style>\n</head>\n<body>\n{chr(10).join(body)}\n'
        f"{ending}</body>\n</html>\n"
    )


def asset(name: str) -> str:
    """Read a file that comes with the pages."""
    return resources.files("meshwright.training.views.page").joinpath(name).read_text(encoding="utf-8")


def _fingerprint(text: str) -> str:
    """Return the hash by which the browser accepts this text, but nothing that came with the data."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def breakable(text: str) -> str:
    """Return a text as HTML in which long words, such as paths and keys, may go on in the next line at a separator."""
    return "".join(
        "<wbr/>".join(map(escape, _BREAKS.split(word))) if _LONG.fullmatch(word) else escape(word)
        for word in re.split(r"(\s+)", text)
    )


def table(head: Sequence[str], rows: Iterable[Sequence[str]], changed: Iterable[bool] = (), *, kind: str = "") -> str:
    """Return a table as HTML; rows that are ``changed`` stand out.

    Where the page is narrow, each row becomes a block, and each cell has the title of its column beside it. ``kind`` is
    a class of the style sheet.
    """
    marks, about = iter(changed), f' class="{kind}"' if kind else ""
    labels = [f' data-label="{escape(title)}"' if title else "" for title in head]
    cells = (
        "".join(f"<td{label}>{breakable(cell)}</td>" for label, cell in zip(labels, row, strict=False)) for row in rows
    )
    lines = (f'<tr class="changed">{line}</tr>' if next(marks, False) else f"<tr>{line}</tr>" for line in cells)
    titles = "".join(f"<th>{breakable(title)}</th>" for title in head)
    return f"<table{about}><thead><tr>{titles}</tr></thead><tbody>{''.join(lines)}</tbody></table>"


def tiles(rows: Iterable[tuple[str, str]]) -> str:
    """Return figures with their names as HTML."""
    return f"<dl>{''.join(f'<div><dt>{escape(name)}</dt><dd>{breakable(text)}</dd></div>' for name, text in rows)}</dl>"


def legend(names: Iterable[tuple[int, str]]) -> str:
    """Return the names of colours as HTML, by (number of the colour, name)."""
    items = "".join(f'<li class="c{number}">{breakable(name)}</li>' for number, name in names)
    return f'<ul class="legend">{items}</ul>'


# --- draw curves as SVG

Point = tuple[float, float]

WIDTH, HEIGHT = 400, 240
"""So small that its text can be read where the whole figure is as wide as a phone."""
LEFT, RIGHT, TOP, BOTTOM = 66, 16, 24, 38
COLOURS = 8
BINARY = ("bytes", "KiB", "MiB", "GiB", "TiB", "PiB")
LOG_FROM = 1000.0
"""Positive values that differ by this factor or more are drawn on a logarithmic axis."""


@dataclass(frozen=True)
class Curve:
    """A series to draw. Values that are not finite are shown as crosses at the upper edge."""

    name: str
    points: Sequence[Point]
    colour: int | None = None
    """Number of the colour; None: its place in the chart."""


@dataclass(frozen=True)
class Chart:
    """A figure with one or more curves.

    Attributes:
        marks: (event, steps) that are drawn as vertical lines; "resume" and "skipped" have a style.
        text: formats a value at the axis.
        unit: of the values, as it stands beside the axis and behind a value under the pointer.
        scale: how the script formats values: "", "bytes" or "percent", which have their units with them.
    """

    title: str
    curves: Sequence[Curve]
    text: Callable[[float], str]
    marks: Sequence[tuple[str, Sequence[float]]] = ()
    unit: str = ""
    scale: str = ""


@dataclass(frozen=True)
class ChartAxis:
    """Maps values to places; ``ticks`` are the values to write, each by ``text``, in units of ``title``."""

    low: float
    high: float
    begins: float
    ends: float
    is_log: bool = False
    ticks: Sequence[float] = field(default=())
    title: str = ""
    text: Callable[[float], str] = str

    def __call__(self, value: float) -> float:
        low, high, here = (math.log10(v) if self.is_log else v for v in (self.low, self.high, value))
        return self.begins + (here - low) / (high - low) * (self.ends - self.begins)


AXES = ("steps", "tokens", "seconds")
"""Quantities that curves may be drawn over."""
_DURATIONS = ((3 * 86_400, 86_400, "days"), (3 * 3600, 3600, "hours"), (180, 60, "minutes"), (0, 1, "seconds"))


def common_axis(charts: Sequence[Chart], by: str = "steps") -> ChartAxis:
    """Build one axis for all charts, so that they can be compared: of steps, tokens or seconds."""
    places = [point[0] for chart in charts for curve in chart.curves for point in curve.points]
    low, high = (min(places), max(places)) if places else (0, 1)
    if low == high:
        low, high = low - 1, high + 1
    if by == "tokens":
        return ChartAxis(
            low, high, LEFT, WIDTH - RIGHT, ticks=nice(low, high, 4), title="tokens trained on", text=count_text
        )
    if by == "seconds":
        _, size, name = next(row for row in _DURATIONS if high >= row[0])
        ticks = [tick * size for tick in nice(low / size, high / size, 5)]
        ticks = [min(max(tick, low), high) for tick in ticks]  # clamped: it rounds
        return ChartAxis(
            low,
            high,
            LEFT,
            WIDTH - RIGHT,
            ticks=ticks,
            title=f"{name} of training",
            text=lambda value: f"{value / size:.6g}",
        )
    ticks = [tick for tick in nice(low, high, 5) if tick == int(tick)]
    return ChartAxis(low, high, LEFT, WIDTH - RIGHT, ticks=ticks, title="optimizer steps", text=_steps)


def _steps(value: float) -> str:
    return f"{int(value):,}" if abs(value) < 100_000 else count_text(value)


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
    unit = 1024.0 ** int(math.log(high, 1024)) if chart.scale == "bytes" and high > 1 else 1.0
    ticks = [min(max(tick * unit, low), high) for tick in nice(low / unit, high / unit, 5)]  # clamped: it rounds
    return ChartAxis(low, high, HEIGHT - BOTTOM, TOP, False, ticks)


def figure(chart: Chart, x: ChartAxis) -> str:
    """Return the chart as an HTML figure, readable without scripts."""
    y = value_axis(chart)
    title = chart.title + (" (logarithmic)" if y.is_log else "")
    parts = [_grid(x, y, chart)]
    parts += [_mark(what, x(step)) for what, steps in chart.marks for step in steps if x.low <= step <= x.high]
    colours = [
        (number if curve.colour is None else curve.colour) % COLOURS for number, curve in enumerate(chart.curves)
    ]
    parts += [_curve(curve, colour, x, y) for colour, curve in zip(colours, chart.curves, strict=True)]
    names = zip(colours, (curve.name for curve in chart.curves), strict=True)
    keys = legend(names) if len(chart.curves) > 1 else ""
    return (
        f'<figure><figcaption>{escape(title)}</figcaption>{keys}<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img"'
        f' aria-label="{escape(title)}">{"".join(parts)}<line class="cursor" y1="{TOP}"'
        f' y2="{HEIGHT - BOTTOM}"/></svg></figure>'
    )


def hover_data(chart: Chart, x: ChartAxis) -> dict[str, Any]:
    """Return the data that the script shows under the pointer: places and values as drawn, null if not finite."""
    curves = [
        {
            "name": curve.name,
            "at": [place for place, _ in curve.points],
            "values": [value if math.isfinite(value) else None for _, value in curve.points],
        }
        for curve in chart.curves
    ]
    return {
        "title": chart.title,
        "unit": chart.unit,
        "scale": chart.scale,
        "by": x.title,
        "x": [x.low, x.high, x.begins, x.ends],
        "curves": curves,
    }


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


def _grid(x: ChartAxis, y: ChartAxis, chart: Chart) -> str:
    unit, labels = _labels(y.ticks, chart)
    rows = "".join(
        f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y(v):.1f}" y2="{y(v):.1f}"/>'
        f'<text class="value" x="{LEFT - 6}" y="{y(v) + 4:.1f}">{escape(label)}</text>'
        for v, label in zip(y.ticks, labels, strict=True)
    )
    bottom = HEIGHT - BOTTOM
    columns = "".join(
        f'<text class="step" x="{x(v):.1f}" y="{bottom + 15}">{escape(x.text(v))}</text>' for v in x.ticks
    )
    units = f'<text class="unit" x="4" y="12">{escape(unit)}</text>'
    units += f'<text class="unit along" x="{(LEFT + WIDTH - RIGHT) / 2}" y="{HEIGHT - 5}">{escape(x.title)}</text>'
    return rows + columns + units


def _labels(values: Sequence[float], chart: Chart) -> tuple[str, list[str]]:
    """Return the unit of an axis, and its values as text: with as many digits as it takes to tell them apart."""
    size, unit, letter = 1.0, chart.unit, ""
    largest = max((abs(value) for value in values), default=0.0)
    if chart.scale == "bytes":
        power = min(int(math.log(largest, 1024)), len(BINARY) - 1) if largest > 1 else 0
        size, unit = 1024.0**power, BINARY[power]
    elif chart.scale == "percent":
        size = 0.01
    else:
        texts = [chart.text(value) for value in values]
        if len(set(texts)) == len(texts):
            return unit, texts
        if chart.text is count_text and 1000 <= largest < 1e15:
            power = int(math.log10(largest) / 3)
            size, letter = 1000.0**power, " KMBT"[power]
    texts: list[str] = []
    for digits in range(4, 16):
        texts = [f"{value / size:.{digits}g}{letter}" for value in values]
        if len(set(texts)) == len(texts):
            break
    return unit, texts


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


# --- choose what is drawn of a run's metrics

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
