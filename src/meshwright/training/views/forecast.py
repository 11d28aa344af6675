"""Write a forecast's page: the layouts of the answer, and of the first its memory and step in time.

No time stamp stands in it: the same answer gives the same bytes. Torch-free.
"""

from __future__ import annotations

from array import array
from collections import defaultdict
from collections.abc import Sequence

from meshwright.core.dtypes import duration_text
from meshwright.simulation.search.answer import HEADS, figures, row
from meshwright.simulation.search.search import Candidate
from meshwright.simulation.workload.timeline import (
    LaneBar,
    LaneUse,
    MemoryOverTime,
    StepTimeline,
    memory_over_step,
    step_timeline,
)
from meshwright.training.views.drawing import Axis, Curve, Figure, document, element, soft, table, tiles
from meshwright.training.views.page import Series, thinned

SECONDS, GIGABYTES = Axis("of a step", "seconds", from_zero=True), Axis("GB", "GB", from_zero=True)


def gigabytes(size: float) -> str:
    """Format 10⁹ bytes as the command prints them."""
    return f"{size / 1e9:.1f} GB"


def forecast_page(shown: Sequence[Candidate], front: Sequence[Candidate], toml: str = "") -> str:
    """Return a forecast as an HTML page.

    Args:
        shown: candidates that the command prints, the first of which is drawn.
        front: candidates of which no other is both faster and smaller.
        toml: keys of a config that train with the first, where it was searched.
    """
    first = shown[0]
    job, machines, values = first.job, first.job.machines, figures(first)
    timeline = step_timeline(job, first.time)
    name = f"{job.architecture.name} on {machines.gpus} {machines.device.name}"
    facts = [
        ("memory per GPU", f"{values['mem_gb']:.1f} of {gigabytes(machines.device.memory_bytes)}"),
        ("the card", "has room" if first.fits else "is too small"),
        ("step", f"{values['step_s']:.2f} s"),
        ("tokens/s/GPU", f"{values['tok_s_gpu']:,.0f}"),
        ("MFU", f"{values['mfu']:.1%}"),
        ("tokens a day", f"{values['tokens_per_day'] / 1e9:.2f} billion"),
        ("GPU hours for a billion tokens", f"{values['gpu_hours_per_billion_tokens']:,.0f}"),
    ]
    batch = f"{machines.per_node} GPUs per node, {job.rows} rows of {job.seq_len} tokens per step."
    sections = [
        element("h1", name),
        soft(f"{batch} A forecast from data sheets and shapes alone: nothing was run on a GPU."),
        tiles(facts),
        element("h2", "Layouts"),
        table(HEADS, [row(one) for one in shown]),
        scatter_figure(shown, front),
        element("h2", f"The first: {job.layout}"),
        memory_figure(first, memory_over_step(job, first.memory, timeline)),
        lanes_figure(first, timeline),
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
    text = table(HEADS, [row(one) for one in (*shown, *every[len(shown) :])])
    limits = [("x", limit, f"the card has {gigabytes(limit)}")]
    y = Axis("of a step", "seconds")
    return Figure("Layouts by memory and time", curves, GIGABYTES, y, limits=limits, says=says, inside=text)


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
    return Figure("Memory over a step", curves, SECONDS, GIGABYTES, limits=limits, says=says, inside=text)


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
    job, ranks = candidate.job, len(timeline.work)
    lanes = dict(enumerate(timeline.work)) | {rank + 0.5: lane for rank, lane in enumerate(timeline.beside)}
    is_whole = sum(map(len, lanes.values())) <= MOST_BARS
    bars: dict[LaneUse, list[tuple[float, LaneBar]]] = {}
    for place, lane in lanes.items():
        for bar in lane if is_whole else columns_of(lane, timeline.seconds):
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
    rows, idle = [], [timeline.seconds - timeline.busy(rank) for rank in range(ranks)]
    for rank, lane in enumerate(timeline.work):
        seconds = {use: sum(bar.end - bar.begin for bar in lane if bar.use is use) for use in LaneUse}
        words = ", ".join(f"{use} {duration_text(taken)}" for use, taken in seconds.items() if taken)
        rows.append((str(rank), words, f"{duration_text(idle[rank])} ({idle[rank] / timeline.seconds:.1%})"))
    says = f"A step takes {duration_text(timeline.seconds)}"
    if ranks > 1:
        says += (
            f", of which the ranks of the pipeline ({job.schedule}, {job.microbatches} microbatches) wait"
            f" {duration_text(min(idle))} to {duration_text(max(idle))}: grey."
        )
    else:
        exposed = sum(bar.end - bar.begin for bar in timeline.work[0] if bar.use in (LaneUse.EXPOSED, LaneUse.DATA))
        says += (
            f", of which messages that nothing hides take {duration_text(exposed)}; further"
            f" {duration_text(candidate.time.hidden_s)} of messages run behind the work."
        )
    names = [f"rank {rank}" for rank in range(ranks)] if ranks > 1 else ["every GPU"]
    title, text = f"A step{' of each pipeline rank' * (ranks > 1)}", table(("pipeline rank", "time", "waits"), rows)
    return Figure(title, curves, SECONDS, Axis("pipeline ranks"), lanes=names, says=says, inside=text)


def columns_of(lane: Sequence[LaneBar], seconds: float) -> list[LaneBar]:
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
