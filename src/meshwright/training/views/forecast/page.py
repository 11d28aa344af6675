"""Write a forecast's page: the layouts of the answer, and of the first its mesh, memory and step in time."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from meshwright.core.dtypes import duration_text
from meshwright.planning.collectives import resolved
from meshwright.planning.plan import Plan
from meshwright.planning.values import Batch
from meshwright.simulation.search.answer import HEADS, figures, row
from meshwright.simulation.search.search import Candidate
from meshwright.simulation.workload.timeline import MemoryOverTime, memory_over_step, step_timeline
from meshwright.training.views.page.charts import ChartAxis, framed, nice, table, tiles

from .lanes import lanes_figure
from .picture import (
    LEFT,
    RIGHT,
    TOP,
    WIDTH,
    figure,
    gigabytes,
    mesh_figure,
    scatter_figure,
    seconds_axis,
    seconds_ticks,
    title,
)

# --- draw what a GPU holds over a step, as areas on top of each other

HEIGHT, BOTTOM = 300, 26
MOST_TIMES = 1500
"""Times that are drawn at most; of more, that with the most bytes of each equal portion, and its ends."""
NAMES = {
    "context": (7, "driver and libraries"),
    "parameters": (0, "parameters"),
    "optimizer": (6, "optimizer state"),
    "gradients": (1, "gradients"),
    "gathered": (4, "gathered parameters"),
    "activations": (2, "activations"),
    "logits": (3, "logits"),
    "fragmented": (5, "reserved, not used"),
}
"""Part of a forecast -> (number of its colour, name), from the bottom up."""


def memory_figure(candidate: Candidate, held: MemoryOverTime) -> str:
    """Draw the memory of a candidate's fullest rank over a step."""
    most, limit = candidate.memory.total, candidate.job.machines.device.memory_bytes
    seconds = held.times[-1]
    x = seconds_axis(seconds)
    highest = 1.05 * max(most, limit if limit < 4 * most else most)
    y = ChartAxis(0.0, highest, HEIGHT - BOTTOM, TOP, ticks=[tick * 1e9 for tick in nice(0.0, highest / 1e9, 5)])
    totals = held.totals
    shown = drawn_times(totals)
    names = [name for name in NAMES if name in held.parts]
    parts = [_grid(y), seconds_ticks(x, HEIGHT - BOTTOM)]
    below = [0.0] * len(shown)
    for name in names:
        above = [lower + held.parts[name][place] for lower, place in zip(below, shown, strict=True)]
        parts.append(_area(name, [x(held.times[place]) for place in shown], below, above, y))
        below = above
    peak = totals.index(max(totals))
    parts.append(_line(y(most), f"most: {gigabytes(most)} at {duration_text(held.times[peak])}", "mark"))
    if limit < highest:
        parts.append(_line(y(limit), f"the card has {gigabytes(limit)}", "limit"))
    rank = f" of pipeline rank {candidate.memory.rank}" if candidate.job.layout.pp > 1 else ""
    says = (
        f"Memory of a GPU{rank} over a step of {duration_text(seconds)}: at most {gigabytes(most)} of"
        f" {gigabytes(limit)}, at {duration_text(held.times[peak])}."
    )
    rows = [(NAMES[name][1], gigabytes(held.parts[name][peak]), gigabytes(held.parts[name][0])) for name in names]
    rows.append(("together", gigabytes(most), gigabytes(totals[0])))
    text = table(("", "at the fullest moment", "as the step begins"), rows)
    return figure("Memory over a step", says, [NAMES[name] for name in names], (WIDTH, HEIGHT), parts, text)


def drawn_times(totals: Sequence[float]) -> list[int]:
    """Choose the places of times to draw, the fullest among them."""
    number = len(totals)
    if number <= MOST_TIMES:
        return list(range(number))
    size = -(-number // (MOST_TIMES // 3))
    chosen: set[int] = set()
    for first in range(0, number, size):
        portion = range(first, min(first + size, number))
        chosen |= {portion[0], portion[-1], max(portion, key=totals.__getitem__)}
    return sorted(chosen)


def _area(name: str, places: Sequence[float], below: Sequence[float], above: Sequence[float], y: ChartAxis) -> str:
    top = [f"{x:.1f} {y(size):.1f}" for x, size in zip(places, above, strict=True)]
    bottom = [f"{x:.1f} {y(size):.1f}" for x, size in zip(places, below, strict=True)]
    colour, words = NAMES[name]
    path = f"M{'L'.join(top)}L{'L'.join(reversed(bottom))}Z"
    return f'<path class="area f{colour}" data-name="{name}" d="{path}">{title(words)}</path>'


def _grid(y: ChartAxis) -> str:
    return "".join(
        f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y(tick):.1f}" y2="{y(tick):.1f}"/>'
        f'<text class="value" x="{LEFT - 6}" y="{y(tick) + 4:.1f}">{tick / 1e9:,g} GB</text>'
        for tick in y.ticks
    )


def _line(height: float, words: str, kind: str) -> str:
    return (
        f'<line class="{kind}" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{height:.1f}" y2="{height:.1f}"/>'
        f'<text class="value" x="{WIDTH - RIGHT - 4}" y="{height - 4:.1f}">{words}</text>'
    )


# --- write a forecast's page


def forecast_page(
    shown: Sequence[Candidate], front: Sequence[Candidate], plan: Plan, batch: Batch, toml: str = ""
) -> str:
    """Return a forecast as an HTML page.

    Args:
        shown: candidates that the command prints, the first of which is drawn.
        front: candidates of which no other is both faster and smaller.
        plan: the first candidate's.
        batch: the step's, with the first candidate's microbatch.
        toml: keys of a config that train with the first, where it was searched.
    """
    first = shown[0]
    job, machines = first.job, first.job.machines
    timeline = step_timeline(job, first.time)
    name = f"{job.architecture.name} on {machines.gpus} {machines.device.name}"
    about = (
        f"{machines.per_node} GPUs per node, {job.rows} rows of {job.seq_len} tokens per step. A forecast from data"
        " sheets and shapes alone: nothing was run on a GPU."
    )
    body = [
        f"<h1>{escape(name)}</h1>",
        f'<p class="soft">{escape(about)}</p>',
        _tiles(first),
        f"<h2>Layouts</h2>{table(HEADS, [row(one) for one in shown])}",
        scatter_figure(shown, front),
        f"<h2>The first: {escape(str(job.layout))}</h2>",
        memory_figure(first, memory_over_step(job, first.memory, timeline)),
        lanes_figure(first, timeline),
        mesh_figure(job, plan, resolved(plan, batch)),
    ]
    if toml:
        body.append(f"<h2>To train with the first</h2><pre>{escape(toml)}</pre>")
    return framed(name, body)


def _tiles(first: Candidate) -> str:
    values, device = figures(first), first.job.machines.device
    return tiles(
        [
            ("memory per GPU", f"{values['mem_gb']:.1f} of {gigabytes(device.memory_bytes)}"),
            ("the card", "has room" if first.fits else "is too small"),
            ("step", f"{values['step_s']:.2f} s"),
            ("tokens/s/GPU", f"{values['tok_s_gpu']:,.0f}"),
            ("MFU", f"{values['mfu']:.1%}"),
            ("tokens a day", f"{values['tokens_per_day'] / 1e9:.2f} billion"),
            ("GPU hours for a billion tokens", f"{values['gpu_hours_per_billion_tokens']:,.0f}"),
        ]
    )
