"""Draw a forecast's parts on SVG: candidates by memory and time, the mesh, marks with their text."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from html import escape

from meshwright.core.axes import WORLD_AXES, Axis
from meshwright.core.dtypes import bytes_text, duration_text
from meshwright.planning.collectives import step_traffic
from meshwright.planning.plan import Plan
from meshwright.planning.values import Batch
from meshwright.simulation.hardware.cards import Group, Machines
from meshwright.simulation.search.answer import HEADS, row
from meshwright.simulation.search.search import Candidate
from meshwright.simulation.workload.execution import Job
from meshwright.training.views.page.charts import ChartAxis, legend, nice, table

# --- draw on SVG

WIDTH, LEFT, RIGHT, TOP = 1200, 84, 24, 12


def seconds_axis(seconds: float) -> ChartAxis:
    """Return the axis of a step's time."""
    end = seconds or 1.0
    return ChartAxis(0.0, end, LEFT, WIDTH - RIGHT, ticks=nice(0.0, end, 8))


def seconds_ticks(x: ChartAxis, bottom: float) -> str:
    """Write the seconds under a picture."""
    return "".join(
        f'<line class="grid" x1="{x(tick):.1f}" x2="{x(tick):.1f}" y1="{TOP}" y2="{bottom:.1f}"/>'
        f'<text class="step" x="{x(tick):.1f}" y="{bottom + 15:.1f}">{escape(duration_text(tick))}</text>'
        for tick in x.ticks
    )


def gigabytes(size: float) -> str:
    """Format 10⁹ bytes as the command prints them."""
    return f"{size / 1e9:.1f} GB"


def title(text: str) -> str:
    """Return an element's text, which a browser shows under the pointer and a screen reader reads."""
    return f"<title>{escape(text)}</title>"


def figure(
    caption: str,
    says: str,
    names: Iterable[tuple[int, str]],
    size: tuple[float, float],
    parts: Sequence[str],
    text: str,
) -> str:
    """Return a figure as HTML.

    Args:
        says: the picture in a sentence, for those who do not see it.
        names: (number of the colour, name) for the legend.
        size: width and height of the picture.
        text: the same as a table, as HTML.
    """
    return (
        f'<figure class="wide"><figcaption>{escape(caption)}</figcaption>{legend(names)}'
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {size[0]:.0f} {size[1]:.0f}" role="img"'
        f' aria-label="{escape(says)}">{title(says)}{"".join(parts)}</svg>'
        f"<p>{escape(says)}</p><details><summary>As a table</summary>{text}</details></figure>"
    )


# --- draw the mesh

CELL, GAP, HEAD, EDGE = 42, 10, 18, 12
MOST_CELLS = 128
"""GPUs that are drawn at most, in whole nodes."""
HOLDS = {
    Axis.PP: "other blocks of the model",
    Axis.DP_REPLICATE: "other rows of the batch, and copies of the same shards",
    Axis.DP_SHARD: "other rows of the batch, and other shards of parameters, gradients and optimizer state",
    Axis.CP: "other tokens of the same rows",
    Axis.TP: "other parts of each weight matrix",
    Axis.EP: "other experts",
    Axis.EFSDP: "other shards of the same experts",
}


def mesh_figure(job: Job, plan: Plan, batch: Batch) -> str:
    """Draw the nodes of a job's mesh."""
    machines, layout = job.machines, job.layout
    nodes = -(-machines.gpus // machines.per_node)
    drawn = max(1, min(nodes, MOST_CELLS // machines.per_node))
    across = min(machines.per_node, 8)
    rows = -(-machines.per_node // across)
    wide, high = across * CELL + 2 * GAP, rows * CELL + HEAD + 2 * GAP
    per_line = max(1, int((WIDTH - 2 * EDGE) // (wide + GAP)))
    axes = partners(job)
    parts = []
    for node in range(drawn):
        left, top = EDGE + node % per_line * (wide + GAP), EDGE + node // per_line * (high + GAP)
        parts.append(f'<rect class="frame" x="{left}" y="{top}" width="{wide}" height="{high}" rx="6"/>')
        parts.append(f'<text x="{left + GAP}" y="{top + 15}">node {node}</text>')
        for place in range(min(machines.per_node, machines.gpus - node * machines.per_node)):
            at = left + GAP + place % across * CELL, top + HEAD + GAP + place // across * CELL
            parts.append(_gpu(node * machines.per_node + place, at, job, axes))
    lines = -(-drawn // per_line)
    size = (WIDTH, 2 * EDGE + lines * (high + GAP))
    rest = f"; {nodes - drawn} more nodes are alike" if nodes > drawn else ""
    says = (
        f"{machines.gpus} {machines.device.name} as {layout}, {nodes} node{'s' if nodes > 1 else ''} of"
        f" {machines.per_node}{rest}. The colour is the pipeline rank; dots mark the GPUs with which GPU 0"
        f" exchanges data, by axis."
    )
    names = [(_colour(axis), f"{axis}: {len(ranks)} GPUs") for axis, ranks in axes.items()]
    return figure("The mesh", says, names, size, parts, _stages(job)) + traffic_table(job, plan, batch)


def coordinates(rank: int, sizes: Mapping[Axis, int]) -> dict[Axis, int]:
    """Return a rank's place on each axis; the last axis varies fastest."""
    found = {}
    for axis in reversed(WORLD_AXES):
        rank, found[axis] = divmod(rank, sizes[axis])
    return {axis: found[axis] for axis in WORLD_AXES}


def _sizes(job: Job) -> dict[Axis, int]:
    return {axis: getattr(job.layout, axis.value) for axis in WORLD_AXES}


def groups(job: Job) -> dict[Axis, Group]:
    """Return the groups along the axes that have more than one rank."""
    found, stride, sizes = {}, 1, _sizes(job)
    for axis in reversed(WORLD_AXES):
        found[axis] = Group(sizes[axis], stride)
        stride *= sizes[axis]
    ordered, ep = {axis: found[axis] for axis in WORLD_AXES}, job.layout.ep
    if ep > 1:  # experts have a mesh of their own over the same ranks
        inside = sizes[Axis.DP_SHARD] * sizes[Axis.CP] * sizes[Axis.TP]
        ordered |= {Axis.EP: Group(ep, 1), Axis.EFSDP: Group(inside // ep, ep)}
    return {axis: group for axis, group in ordered.items() if group.size > 1}


def partners(job: Job) -> dict[Axis, list[int]]:
    """Return for each axis the ranks of rank 0's group."""
    return {axis: [n * group.stride for n in range(group.size)] for axis, group in groups(job).items()}


def _colour(axis: Axis) -> int:
    return [*WORLD_AXES, Axis.EP, Axis.EFSDP].index(axis) + 1


def _gpu(rank: int, at: tuple[float, float], job: Job, axes: Mapping[Axis, list[int]]) -> str:
    where = coordinates(rank, _sizes(job))
    words = [f"{axis} {place}" for axis, place in where.items() if getattr(job.layout, axis.value) > 1]
    name = f"GPU {rank}: {', '.join(words)}" if words else f"GPU {rank}"
    x, y = at
    dots = "".join(
        f'<circle class="f{_colour(axis)}" cx="{x + 7 + 8 * number}" cy="{y + 30}" r="3">{title(axis)}</circle>'
        for number, (axis, ranks) in enumerate(axes.items())
        if rank in ranks and rank
    )
    side = CELL - 3
    return (
        f'<g>{title(name)}<rect class="cell f{where[Axis.PP] % 8}" x="{x}" y="{y}" width="{side}" height="{side}"'
        f' rx="3"/><text x="{x + 4}" y="{y + 14}">{rank}</text>{dots}</g>'
    )


def _stages(job: Job) -> str:
    """Return which blocks each pipeline rank has."""
    homes, bounds, rows = job.rank_of, job.stage_bounds, []
    for rank in range(job.layout.pp):
        words = [f"stage {stage}: {_blocks(*bounds[stage])}" for stage, home in enumerate(homes) if home == rank]
        words += ["embedding"] * (homes[0] == rank) + ["head and loss"] * (homes[-1] == rank)
        rows.append((str(rank), "; ".join(words)))
    return table(("pipeline rank", "has"), rows)


def _blocks(first: int, end: int) -> str:
    return "no block" if first == end else f"block {first}" if end == first + 1 else f"blocks {first} to {end - 1}"


def link_of(group: Group, machines: Machines) -> str:
    """Return over which link a group's messages go."""
    inside = group.in_node(machines)
    if inside >= group.size:
        return f"{machines.inside.name} in a node"
    return machines.across.name if inside == 1 else f"{machines.inside.name}, and {machines.across.name} between nodes"


def traffic_table(job: Job, plan: Plan, batch: Batch) -> str:
    """Return by axis who talks to whom, and how much a GPU sends in a step, as the plan counts it."""
    sent: dict[str, list[str]] = {}
    bytes_of: dict[str, float] = {}
    for one in step_traffic(plan, batch):
        sent.setdefault(one.axis, []).append(f"{one.op} {bytes_text(one.bytes)} ({one.ranks})")
        bytes_of[one.axis] = bytes_of.get(one.axis, 0.0) + one.bytes
    rows, known = [], groups(job)
    for axis, ranks in partners(job).items():
        listed = ", ".join(map(str, ranks[:4])) + (f", … {ranks[-1]}" if len(ranks) > 4 else "")
        total = bytes_of.pop(axis.value, 0.0)
        words = "; ".join(sent.get(axis.value, ["nothing"]))
        rows.append(
            (
                f"{axis} = {len(ranks)}",
                HOLDS[axis],
                listed,
                link_of(known[axis], job.machines),
                bytes_text(total),
                words,
            )
        )
    for axis, total in bytes_of.items():
        rows.append((axis, "", "", "", bytes_text(total), "; ".join(sent[axis])))
    whole = math.fsum(row.bytes for row in step_traffic(plan, batch))
    head = ("axis", "its GPUs have", "GPU 0 is with", "over", "a GPU sends per step", "by (GPUs of a group)")
    return f"<h2>Messages of a step: {bytes_text(whole)} from each GPU</h2>{table(head, rows)}"


# --- draw candidates by their memory and the time of a step

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
