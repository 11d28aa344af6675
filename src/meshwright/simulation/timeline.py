"""Lay a forecast step out in time: what each pipeline rank does when, and what the fullest one holds meanwhile."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from meshwright.planning.pipeline.schedule import Action, Work
from meshwright.simulation.job import Job
from meshwright.simulation.pipeline import moments_on, pipeline_spans, schedule_of
from meshwright.simulation.step_memory import HeldBytes, SavedBytes, StepMemory
from meshwright.simulation.step_time import Cost, Kinds, StepTime, stage_seconds, step_time

Span = tuple[Action, float, float]
"""An action, its begin and its end, in seconds."""
EXPOSED = (Cost.TENSOR, Cost.CONTEXT, Cost.EXPERTS)
"""Messages inside forwards and backwards that no work hides."""


class LaneUse(StrEnum):
    """The activity that a bar of a lane stands for."""

    FORWARD = "forward"
    BACKWARD = "backward"
    INPUT = "gradients of inputs"
    WEIGHT = "gradients of weights"
    EXPOSED = "messages that nothing hides"
    DATA = "gathers and reductions that nothing hides"
    OPTIMIZER = "optimizer"
    SENT = "message to another rank"
    HIDDEN = "gathers and reductions behind the work"


USES = {
    Work.FORWARD: LaneUse.FORWARD,
    Work.BACKWARD: LaneUse.BACKWARD,
    Work.INPUT: LaneUse.INPUT,
    Work.WEIGHT: LaneUse.WEIGHT,
}


@dataclass(frozen=True)
class LaneBar:
    """Seconds of a lane with one use."""

    use: LaneUse
    begin: float
    end: float
    label: str = ""


@dataclass(frozen=True)
class StepTimeline:
    """A step in time.

    Attributes:
        seconds: end of the step.
        work: for each pipeline rank, its bars one after the other; between them it waits.
        beside: for each pipeline rank, messages that run while it works or waits.
        spans: for each pipeline rank, its actions; they end before the last messages and the optimizer.
    """

    seconds: float
    work: tuple[tuple[LaneBar, ...], ...]
    beside: tuple[tuple[LaneBar, ...], ...]
    spans: tuple[tuple[Span, ...], ...]

    def busy(self, rank: int) -> float:
        """Return the seconds in which a rank does not wait."""
        return sum(bar.end - bar.begin for bar in self.work[rank])


@dataclass(frozen=True)
class MemoryOverTime:
    """Bytes of a rank over a step; between the times they change evenly.

    Attributes:
        times: seconds, rising; a time that stands twice is a jump.
        parts: bytes at these times, by the names of ``StepMemory``.
    """

    times: tuple[float, ...]
    parts: dict[str, tuple[float, ...]]

    @property
    def totals(self) -> list[float]:
        return [sum(sizes) for sizes in zip(*self.parts.values(), strict=True)]


def step_timeline(job: Job, time: StepTime | None = None) -> StepTimeline:
    """Lay a job's step out in time; the last lane's end is the forecast of the step."""
    kinds, time = Kinds(job), time or step_time(job)
    slow, seconds = job.execution.straggler, stage_seconds(job, kinds)
    lanes = pipeline_spans(job, seconds)
    spans = [[(action, begin * slow, end * slow) for action, begin, end in lane] for lane in lanes]
    ended = max(end for lane in spans for _, _, end in lane)
    last = [LaneBar(LaneUse.DATA, ended, ended + time.costs.get(Cost.DATA, 0.0))]
    last.append(LaneBar(LaneUse.OPTIMIZER, last[0].end, last[0].end + time.costs.get(Cost.OPTIMIZER, 0.0)))
    last = [bar for bar in last if bar.end > bar.begin]
    exposed: dict[Work, list[float]] = {}  # by stage, of one microbatch
    for kind_of_work in (Work.FORWARD, Work.BACKWARD):
        of_kinds = [times.forward if kind_of_work is Work.FORWARD else times.backward for times in kinds.times]
        by_kind = [sum(costs.get(cost, 0.0) for cost in EXPOSED) for costs in of_kinds]
        order = job.architecture.kinds[1]
        exposed[kind_of_work] = [sum(by_kind[kind] for kind in order[a:b]) for a, b in job.stage_bounds]
    exposed[Work.INPUT] = exposed[Work.BACKWARD]
    work: list[tuple[LaneBar, ...]] = []
    for lane in spans:
        bars: list[LaneBar] = []
        for action, begin, end in lane:  # the work, then the messages in it that nothing hides
            messages = exposed[action.work][action.stage] * slow if action.work in exposed else 0.0
            bars.append(LaneBar(USES[action.work], begin, end - messages, str(action)))
            if messages > 0:
                bars.append(LaneBar(LaneUse.EXPOSED, end - messages, end, str(action)))
        work.append((*bars, *last))
    beside: list[tuple[LaneBar, ...]] = []
    if job.layout.pp > 1:  # messages to ranks with the stage before or behind
        homes, message = job.rank_of, seconds.message * slow
        for rank, lane in enumerate(spans):
            bars = []
            for action, _, end in lane:
                to = action.stage + (1 if action.work is Work.FORWARD else -1)
                if message > 0 and action.work is not Work.WEIGHT and 0 <= to < len(homes) and homes[to] != rank:
                    bars.append(LaneBar(LaneUse.SENT, end, end + message, f"{action} to rank {homes[to]}"))
            beside.append(tuple(bars))
    else:  # messages that run behind the work, spread evenly over it
        over = [bar for bar in work[0] if bar.use in USES.values()]
        whole = sum(bar.end - bar.begin for bar in over)
        part = min(1.0, time.hidden_s / whole) if whole else 0.0
        beside.append(tuple(LaneBar(LaneUse.HIDDEN, b.begin, b.begin + part * (b.end - b.begin)) for b in over if part))
    return StepTimeline(last[-1].end if last else ended, tuple(work), tuple(beside), tuple(map(tuple, spans)))


def memory_over_step(job: Job, memory: StepMemory, timeline: StepTimeline) -> MemoryOverTime:
    """Return the bytes of ``memory``'s rank over a step, whose most are those of ``memory``.

    Gradients are there from the first backward on, gathered parameters until the optimizer's step; the driver's memory
    and what the allocator does not use count as at the peak.
    """
    rank = memory.rank
    held = HeldBytes.of(job, rank, SavedBytes(job))
    spans, moments = timeline.spans[rank], moments_on(schedule_of(job), rank)
    points: list[tuple[float, float, float, bool]] = []  # (seconds, activations, logits, whether gradients are there)
    has_gradients, before = False, 0.0
    for (action, begin, end), (first, last) in zip(spans, moments, strict=True):
        if begin > before:  # it waited
            points += [(moment, *held.at(first, computes=False), has_gradients) for moment in (before, begin)]
        if action.work is not Work.FORWARD and not has_gradients:
            points.append((begin, *held.at(first), False))
            has_gradients = True
        points += [(begin, *held.at(first), has_gradients), (end, *held.at(last), has_gradients)]
        before = end
    computed = len(points)
    reduced = max(end for lane in timeline.spans for _, _, end in lane)
    reduced = max([reduced, *(bar.end for bar in timeline.work[rank] if bar.use is LaneUse.DATA)])
    points += [(moment, 0.0, 0.0, has_gradients) for moment in (before, reduced)]
    points += [(moment, 0.0, 0.0, has_gradients) for moment in (reduced, timeline.seconds)]
    number, gathers = len(points), computed + 2
    parts = {
        "parameters": [memory.parameters] * number,
        "optimizer": [memory.optimizer] * number,
        "gradients": [memory.gradients * there for *_, there in points],
        "gathered": [memory.gathered] * gathers + [0.0] * (number - gathers),
        "activations": [activations for _, activations, _, _ in points],
        "logits": [logits for _, _, logits, _ in points],
        "context": [memory.context] * number,
        "fragmented": [memory.fragmented] * number,
    }
    return MemoryOverTime(
        tuple(moment for moment, *_ in points), {name: tuple(sizes) for name, sizes in parts.items() if any(sizes)}
    )
