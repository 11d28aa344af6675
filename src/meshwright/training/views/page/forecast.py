"""Write a forecast's page: the layouts of the answer, and of the first its mesh, memory and step in time.

No time stamp stands in it: the same answer gives the same bytes. Torch-free.
"""

from __future__ import annotations

import math
from array import array
from collections import defaultdict
from collections.abc import Mapping, Sequence

from meshwright.core.axes import WORLD_AXES, Axis
from meshwright.core.dtypes import bytes_text, duration_text
from meshwright.planning.collectives import resolved, step_traffic
from meshwright.planning.plan import Plan
from meshwright.planning.values import Batch
from meshwright.simulation.answer import HEADS, figures, row
from meshwright.simulation.cards import Group, Machines
from meshwright.simulation.job import Job
from meshwright.simulation.search import Candidate
from meshwright.simulation.timeline import (
    LaneBar,
    LaneUse,
    MemoryOverTime,
    StepTimeline,
    memory_over_step,
    step_timeline,
)

from . import drawing
from .drawing import COLOURS, Curve, Figure, Html, document, element, folded, soft, table, tiles
from .history import Series, thinned

SECONDS = drawing.Axis("of a step", "seconds", from_zero=True)


def gigabytes(size: float) -> str:
    """Format 10⁹ bytes as the command prints them."""
    return f"{size / 1e9:.1f} GB"


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
    job, machines, values = first.job, first.job.machines, figures(first)
    timeline = step_timeline(job, first.time)
    name = f"{job.architecture.name} on {machines.gpus} {machines.device.name}"
    sections = [
        element("h1", name),
        soft(
            f"{machines.per_node} GPUs per node, {job.rows} rows of {job.seq_len} tokens per step. A forecast from data"
            " sheets and shapes alone: nothing was run on a GPU."
        ),
        tiles(
            [
                ("memory per GPU", f"{values['mem_gb']:.1f} of {gigabytes(machines.device.memory_bytes)}"),
                ("the card", "has room" if first.fits else "is too small"),
                ("step", f"{values['step_s']:.2f} s"),
                ("tokens/s/GPU", f"{values['tok_s_gpu']:,.0f}"),
                ("MFU", f"{values['mfu']:.1%}"),
                ("tokens a day", f"{values['tokens_per_day'] / 1e9:.2f} billion"),
                ("GPU hours for a billion tokens", f"{values['gpu_hours_per_billion_tokens']:,.0f}"),
            ]
        ),
        element("h2", "Layouts"),
        table(HEADS, [row(one) for one in shown]),
        scatter_figure(shown, front),
        element("h2", f"The first: {job.layout}"),
        memory_figure(first, memory_over_step(job, first.memory, timeline)),
        lanes_figure(first, timeline),
        *mesh_section(job),
        *traffic_section(job, plan, resolved(plan, batch)),
        *([element("h2", "To train with the first"), element("pre", toml)] if toml else []),
    ]
    return document(name, sections)


def scatter_figure(shown: Sequence[Candidate], front: Sequence[Candidate]) -> Figure:
    """Draw candidates by memory and time, the first of them chosen, and those that nothing faster and smaller beats."""
    every = list({one.key: one for one in (*shown, *front)}.values())
    limit, on_front = shown[0].job.machines.device.memory_bytes, {one.key for one in front}
    kinds = {"others": [], "on the front": [], "the first": every[:1]}
    for one in every[1:]:
        kinds["on the front" if one.key in on_front else "others"].append(one)
    places = {one.key: (one.memory.total, one.time.seconds) for one in (*every, *front)}
    texts = {one.key: ", ".join(cell for cell in row(one) if cell) for one in every}
    curves = [
        Curve(name, [places[one.key] for one in found], "points", colour, [texts[one.key] for one in found])
        for colour, (name, found) in zip((0, 2, 1), kinds.items(), strict=True)
    ]
    curves.insert(0, Curve("the front", sorted(places[one.key] for one in front), colour=7))
    most, seconds = places[every[0].key]
    says = (
        f"{len(every)} layouts by memory and time of a step; the first takes {duration_text(seconds)} and"
        f" {gigabytes(most)} of {gigabytes(limit)}. {len(front)} are on the front: none is both faster and smaller."
    )
    x, y = drawing.Axis("GB", "GB", from_zero=True), drawing.Axis("of a step", "seconds")
    text = table(HEADS, [row(one) for one in (*shown, *every[len(shown) :])])
    limits = [("x", limit, f"the card has {gigabytes(limit)}")]
    return Figure("Layouts by memory and time", curves, x, y, (), limits, (), says, text, True)


# --- what a GPU holds over a step, as areas on top of each other

MOST_TIMES = 1500
PARTS = {
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


def memory_figure(candidate: Candidate, held: MemoryOverTime) -> Figure:
    """Draw the memory of a candidate's fullest rank over a step."""
    most, limit = candidate.memory.total, candidate.job.machines.device.memory_bytes
    totals = held.totals
    times = [place for place, _ in thinned(Series(array("q", range(len(totals))), array("d", totals)), MOST_TIMES)]
    parts = {PARTS[name]: sizes for name in PARTS if (sizes := held.parts.get(name)) is not None}
    curves = [
        Curve(name, [(held.times[place], sizes[place]) for place in times], "area", colour)
        for (colour, name), sizes in parts.items()
    ]
    peak = totals.index(max(totals))
    at = f"at {duration_text(held.times[peak])}"
    rank = f" of pipeline rank {candidate.memory.rank}" if candidate.job.layout.pp > 1 else ""
    says = (
        f"Memory of a GPU{rank} over a step of {duration_text(held.times[-1])}: at most {gigabytes(most)} of"
        f" {gigabytes(limit)}, {at}."
    )
    rows = [(name, gigabytes(sizes[peak]), gigabytes(sizes[0])) for (_, name), sizes in parts.items()]
    rows.append(("together", gigabytes(most), gigabytes(totals[0])))
    text = table(("", "at the fullest moment", "as the step begins"), rows)
    limits = [("y", most, f"most: {gigabytes(most)} {at}"), ("y", limit, f"the card has {gigabytes(limit)}")]
    y = drawing.Axis("GB", "GB", from_zero=True)
    return Figure("Memory over a step", curves, SECONDS, y, (), limits, (), says, text, True)


# --- a step in time: a lane for each pipeline rank, with its waits, and messages beside it

MOST_BARS = 4000
"""Bars that are drawn one by one, with a text each, at most."""
COLUMNS = 1200
"""Of a lane with more bars: each column has the use with most of its time."""
USES = {
    LaneUse.FORWARD: 0,
    LaneUse.BACKWARD: 2,
    LaneUse.INPUT: 2,
    LaneUse.WEIGHT: 4,
    LaneUse.EXPOSED: 1,
    LaneUse.DATA: 3,
    LaneUse.OPTIMIZER: 6,
    LaneUse.SENT: 5,
    LaneUse.HIDDEN: 5,
}
"""Use of a bar -> number of its colour."""


def lanes_figure(candidate: Candidate, timeline: StepTimeline) -> Figure:
    """Draw the lanes of a candidate's step; messages beside a rank's work lie half a lane below it."""
    ranks = len(timeline.work)
    lanes = {rank + half: lane for half, lanes in ((0.0, timeline.work), (0.5, timeline.beside))
             for rank, lane in enumerate(lanes)}  # fmt: skip
    is_whole = sum(map(len, lanes.values())) <= MOST_BARS
    bars: dict[LaneUse, list[tuple[float, LaneBar]]] = {}
    for place, lane in lanes.items():
        for bar in lane if is_whole else _columns(lane, timeline.seconds):
            bars.setdefault(bar.use, []).append((place, bar))
    texts = {
        use: [f"{bar.label}{': ' * bool(bar.label)}{use}, {duration_text(bar.end - bar.begin)}" for _, bar in found]
        for use, found in bars.items()
    }
    curves = [
        Curve(use, [(bar.begin, bar.end, place) for place, bar in bars[use]], "bars", USES[use], texts[use] * is_whole)
        for use in LaneUse
        if use in bars
    ]
    rows = []
    for rank, lane in enumerate(timeline.work):
        seconds = {use: sum(bar.end - bar.begin for bar in lane if bar.use is use) for use in LaneUse}
        words = ", ".join(f"{use} {duration_text(taken)}" for use, taken in seconds.items() if taken)
        waits = timeline.seconds - timeline.busy(rank)
        rows.append((str(rank), words, f"{duration_text(waits)} ({waits / timeline.seconds:.1%})"))
    names = [f"rank {rank}" for rank in range(ranks)] if ranks > 1 else ["every GPU"]
    title, text = f"A step{' of each pipeline rank' * (ranks > 1)}", table(("pipeline rank", "time", "waits"), rows)
    y = drawing.Axis("pipeline ranks")
    return Figure(title, curves, SECONDS, y, (), (), names, _says(candidate, timeline), text, True)


def _columns(lane: Sequence[LaneBar], seconds: float) -> list[LaneBar]:
    """Return a lane's bars as columns of equal width, without those in which it mostly waits."""
    wide, taken = seconds / COLUMNS, defaultdict[tuple[int, LaneUse], float](float)
    for bar in lane:
        for column in range(int(bar.begin / wide), min(int(bar.end / wide), COLUMNS - 1) + 1):
            taken[column, bar.use] += max(0.0, min(bar.end, (column + 1) * wide) - max(bar.begin, column * wide))
    found: list[LaneBar] = []
    for column in range(COLUMNS):
        use = max(LaneUse, key=lambda use: taken[column, use])
        if taken[column, use] > wide - sum(taken[column, other] for other in LaneUse):
            found.append(LaneBar(use, float(f"{column * wide:.6g}"), float(f"{(column + 1) * wide:.6g}")))
    return found


def _says(candidate: Candidate, timeline: StepTimeline) -> str:
    job, step = candidate.job, f"A step takes {duration_text(timeline.seconds)}"
    if job.layout.pp > 1:
        idle = [timeline.seconds - timeline.busy(rank) for rank in range(job.layout.pp)]
        return (
            f"{step}, of which the ranks of the pipeline ({job.schedule}, {job.microbatches} microbatches) wait"
            f" {duration_text(min(idle))} to {duration_text(max(idle))}: grey."
        )
    exposed = sum(bar.end - bar.begin for bar in timeline.work[0] if bar.use in (LaneUse.EXPOSED, LaneUse.DATA))
    return (
        f"{step}, of which messages that nothing hides take {duration_text(exposed)}; further"
        f" {duration_text(candidate.time.hidden_s)} of messages run behind the work."
    )


# --- the mesh, and the messages of its axes

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


def mesh_section(job: Job) -> list[Html]:
    """Draw the nodes of a job's mesh, as elements with their ranks."""
    machines, axes = job.machines, partners(job)
    nodes = -(-machines.gpus // machines.per_node)
    drawn = max(1, min(nodes, MOST_CELLS // machines.per_node))
    boxes = []
    for node in range(drawn):
        first = node * machines.per_node
        gpus = range(first, min(first + machines.per_node, machines.gpus))
        boxes.append(element("li", f"node {node}", element("div", *(_gpu(rank, job, axes) for rank in gpus))))
    rest = f"; {nodes - drawn} more nodes are alike" if nodes > drawn else ""
    says = (
        f"{machines.gpus} {machines.device.name} as {job.layout}, {nodes} node{'s' if nodes > 1 else ''} of"
        f" {machines.per_node}{rest}. The colour is the pipeline rank; dots mark the GPUs with which GPU 0"
        f" exchanges data, by axis."
    )
    names = (element("li", f"{axis}: {len(ranks)} GPUs", class_=f"c{_colour(axis)}") for axis, ranks in axes.items())
    homes, bounds, rows = job.rank_of, job.stage_bounds, []
    for rank in range(job.layout.pp):
        words = [f"stage {stage}: {_blocks(*bounds[stage])}" for stage, home in enumerate(homes) if home == rank]
        words += ["embedding"] * (homes[0] == rank) + ["head and loss"] * (homes[-1] == rank)
        rows.append((str(rank), "; ".join(words)))
    legend, mesh = element("ul", *names, class_="legend"), element("ul", *boxes, class_="mesh")
    text = folded("As a table", table(("pipeline rank", "has"), rows))
    return [element("figure", element("figcaption", "The mesh"), legend, mesh, element("p", says), text, class_="wide")]


def _gpu(rank: int, job: Job, axes: Mapping[Axis, list[int]]) -> Html:
    where = coordinates(rank, _sizes(job))
    words = ", ".join(f"{axis} {place}" for axis, place in where.items() if getattr(job.layout, axis.value) > 1)
    dots = (
        element("i", "•", class_=f"c{_colour(axis)}", title=axis) for axis, others in axes.items() if rank in others[1:]
    )
    name = f"GPU {rank}: {words}" if words else f"GPU {rank}"
    return element("span", str(rank), *dots, class_=f"gpu c{where[Axis.PP] % COLOURS}", title=name)


def _colour(axis: Axis) -> int:
    return [*WORLD_AXES, Axis.EP, Axis.EFSDP].index(axis) + 1


def _blocks(first: int, end: int) -> str:
    return "no block" if first == end else f"block {first}" if end == first + 1 else f"blocks {first} to {end - 1}"


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


def link_of(group: Group, machines: Machines) -> str:
    """Return over which link a group's messages go."""
    inside = group.in_node(machines)
    if inside >= group.size:
        return f"{machines.inside.name} in a node"
    return machines.across.name if inside == 1 else f"{machines.inside.name}, and {machines.across.name} between nodes"


def traffic_section(job: Job, plan: Plan, batch: Batch) -> list[Html]:
    """Return by axis who talks to whom, and how much a GPU sends in a step, as the plan counts it."""
    traffic, known, found = step_traffic(plan, batch), groups(job), partners(job)
    names = dict.fromkeys([*(axis.value for axis in found), *(one.axis for one in traffic)])
    rows = []
    for name in names:
        sent = [one for one in traffic if one.axis == name]
        axis = next((axis for axis in found if axis.value == name), None)
        about = ("", "", "") if axis is None else (HOLDS[axis], _few(found[axis]), link_of(known[axis], job.machines))
        said = "; ".join(f"{one.op} {bytes_text(one.bytes)} ({one.ranks})" for one in sent) or "nothing"
        size = f" = {len(found[axis])}" if axis is not None else ""
        rows.append((f"{name}{size}", *about, bytes_text(math.fsum(one.bytes for one in sent)), said))
    head = ("axis", "its GPUs have", "GPU 0 is with", "over", "a GPU sends per step", "by (GPUs of a group)")
    whole = bytes_text(math.fsum(one.bytes for one in traffic))
    return [element("h2", f"Messages of a step: {whole} from each GPU"), table(head, rows)]


def _few(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks[:4])) + (f", … {ranks[-1]}" if len(ranks) > 4 else "")
