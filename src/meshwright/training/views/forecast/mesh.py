"""Draw the mesh: the nodes and their GPUs, who holds what, who sends how much to whom, and over which link."""

from __future__ import annotations

import math
from collections.abc import Mapping

from meshwright.core.axes import WORLD_AXES, Axis
from meshwright.core.units import bytes_text
from meshwright.planning.plan import Plan
from meshwright.planning.traffic import step_traffic
from meshwright.planning.values import Batch
from meshwright.simulation.hardware.links import Group, Machines
from meshwright.simulation.workload.execution import Job
from meshwright.training.views.page.frame import table

from .picture import WIDTH, figure, title

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
    for row in step_traffic(plan, batch):
        sent.setdefault(row.axis, []).append(f"{row.op} {bytes_text(row.bytes)} ({row.ranks})")
        bytes_of[row.axis] = bytes_of.get(row.axis, 0.0) + row.bytes
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
