"""Draw candidates by their memory and the time of a step."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from meshwright.core.units import duration_text
from meshwright.simulation.search.answer import HEADS, row
from meshwright.simulation.search.search import Candidate
from meshwright.training.views.page.charts import ChartAxis, nice
from meshwright.training.views.page.frame import table

from .picture import LEFT, RIGHT, TOP, WIDTH, figure, gigabytes, title

HEIGHT, BOTTOM = 320, 40


def scatter_figure(shown: Sequence[Candidate], front: Sequence[Candidate]) -> str:
    """Draw candidates, the first of them chosen, and those that nothing faster and smaller beats."""
    every = list({one.key: one for one in (*shown, *front)}.values())
    limit = shown[0].job.machines.device.memory_bytes
    sizes, seconds = [one.memory.total for one in every], [one.time.seconds for one in every]
    x = _axis(0.0, 1.05 * max(*sizes, limit), LEFT, WIDTH - RIGHT, 1e9)
    room = 0.1 * (max(seconds) - min(seconds)) or 0.1 * max(seconds)
    y = _axis(min(seconds) - room, max(seconds) + room, HEIGHT - BOTTOM, TOP, 1.0)
    parts = [_grid(x, y), _limit(x(limit), limit)]
    parts.append(_staircase([(x(one.memory.total), y(one.time.seconds)) for one in front]))
    on_front = {one.key for one in front}
    for number, one in reversed(list(enumerate(every))):
        colour = 1 if number == 0 else 2 if one.key in on_front else 0
        place = f'cx="{x(one.memory.total):.1f}" cy="{y(one.time.seconds):.1f}" r="{7 if number == 0 else 5}"'
        parts.append(
            f'<circle class="f{colour}" {place}>{title(", ".join(cell for cell in row(one) if cell))}</circle>'
        )
    says = (
        f"{len(every)} layouts by memory and time of a step; the first takes {duration_text(seconds[0])} and"
        f" {gigabytes(sizes[0])} of {gigabytes(limit)}. {len(front)} are on the front: none is both faster and smaller."
    )
    names = [(1, "the first"), (2, "on the front"), (0, "others")]
    text = table(HEADS, [row(one) for one in (*shown, *every[len(shown) :])])
    return figure("Layouts by memory and time", says, names, (WIDTH, HEIGHT), parts, text)


def _axis(low: float, high: float, begins: float, ends: float, unit: float) -> ChartAxis:
    return ChartAxis(low, high, begins, ends, ticks=[tick * unit for tick in nice(low / unit, high / unit, 6)])


def _grid(x: ChartAxis, y: ChartAxis) -> str:
    rows = "".join(
        f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y(tick):.1f}" y2="{y(tick):.1f}"/>'
        f'<text class="value" x="{LEFT - 6}" y="{y(tick) + 4:.1f}">{escape(duration_text(tick))}</text>'
        for tick in y.ticks
    )
    columns = "".join(
        f'<text class="step" x="{x(tick):.1f}" y="{HEIGHT - BOTTOM + 16}">{tick / 1e9:,g} GB</text>' for tick in x.ticks
    )
    return rows + columns


def _limit(place: float, limit: float) -> str:
    return (
        f'<line class="limit" x1="{place:.1f}" x2="{place:.1f}" y1="{TOP}" y2="{HEIGHT - BOTTOM}"/>'
        f'<text class="value" x="{place - 4:.1f}" y="{TOP + 10}">the card has {gigabytes(limit)}</text>'
    )


def _staircase(places: Sequence[tuple[float, float]]) -> str:
    """Connect the front: from each candidate to the next smaller one."""
    words = [f"{x:.1f} {y:.1f}" for x, y in sorted(places)]
    return f'<path class="frame" d="M{"L".join(words)}"/>' if len(words) > 1 else ""
