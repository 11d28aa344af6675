"""Put rehearsed seconds and bytes of ranks in the place of a forecast's terms."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from meshwright.core.errors import ConfigError

from .block_times import Cost, Costs
from .execution import Job
from .pipeline import pipeline_seconds
from .step_memory import StepMemory, step_memory
from .step_time import Kinds, StepTime, optimizer_seconds, rank_costs, stage_seconds, step_time

MESSAGES = (Cost.TENSOR, Cost.CONTEXT, Cost.EXPERTS, Cost.DATA)
"""Costs that a rehearsal without links leaves out."""


@dataclass(frozen=True)
class RehearsedRank:
    """The figures of a rank's rehearsal.

    Attributes:
        pipeline_rank: the rank's place on the pipeline axis.
        seconds: seconds of a step.
        mem_bytes: most bytes at one time by the device's allocator.
        has_messages: whether messages took their time in these seconds; else computing alone did.
    """

    pipeline_rank: int
    seconds: float
    mem_bytes: float
    has_messages: bool


def rehearsed_time(job: Job, ranks: Sequence[RehearsedRank]) -> StepTime:
    """Forecast the seconds of a step whose ranks compute as long as was rehearsed.

    Without a pipeline the slowest rank counts, and messages that nothing hides come on top as they are foreseen. With
    one, each rank's stages take their foreseen seconds times what the rank was slower, and the schedule is simulated.

    Raises:
        ConfigError: a rank of the pipeline was not rehearsed.
    """
    slowest = _by_place(job, ranks)
    if job.layout.pp == 1:
        (rank,) = slowest
        foreseen = step_time(job)
        messages = () if rank.has_messages else MESSAGES
        costs = Costs({cost: foreseen.costs[cost] for cost in messages if cost in foreseen.costs})
        costs.add(Cost.REHEARSED, rank.seconds)
        return StepTime(costs, foreseen.hidden_s)
    return _with_pipeline(job, slowest)


def _with_pipeline(job: Job, slowest: Sequence[RehearsedRank]) -> StepTime:
    kinds = Kinds(job)
    slower = [_slower(job, kinds, rank) for rank in slowest]
    stages = stage_seconds(job, kinds)
    homes = job.rank_of

    def scaled(seconds: Sequence[float]) -> tuple[float, ...]:
        return tuple(slower[home] * one for home, one in zip(homes, seconds, strict=True))

    stages = replace(
        stages, forward=scaled(stages.forward), backward=scaled(stages.backward), weight=scaled(stages.weight)
    )
    busy = [0.0] * job.layout.pp
    for home, forward, backward in zip(homes, stages.forward, stages.backward, strict=True):
        busy[home] += job.microbatches * (forward + backward)
    fullest = busy.index(max(busy))
    foreseen, makespan = step_time(job), pipeline_seconds(job, stages)
    costs = Costs({Cost.REHEARSED: busy[fullest], Cost.BUBBLE: max(0.0, makespan - busy[fullest])})
    costs.add(Cost.OPTIMIZER, slower[fullest] * optimizer_seconds(job))
    if not slowest[fullest].has_messages and Cost.DATA in foreseen.costs:
        costs.add(Cost.DATA, foreseen.costs[Cost.DATA])
    return StepTime(costs, foreseen.hidden_s)


def _slower(job: Job, kinds: Kinds, rank: RehearsedRank) -> float:
    """Return a rank's rehearsed seconds over those foreseen, with the messages that a rehearsal may leave out."""
    counts = job.architecture.part(job.bounds_on(rank.pipeline_rank)).counts
    costs = Costs()
    for one in rank_costs(job, kinds, rank.pipeline_rank, counts):
        costs.add_all(one, job.microbatches)
    messages = sum(costs.get(cost, 0.0) for cost in MESSAGES)
    foreseen = costs.seconds + optimizer_seconds(job)
    return (rank.seconds + (0.0 if rank.has_messages else messages)) / foreseen


def rehearsed_memory(job: Job, ranks: Sequence[RehearsedRank]) -> StepMemory:
    """Return the bytes of the fullest rehearsed rank; the driver's and fragmentation come on top as foreseen."""
    fullest = max(_by_place(job, ranks), key=lambda rank: rank.mem_bytes)
    foreseen = step_memory(job)
    allocated = foreseen.total - foreseen.context - foreseen.fragmented
    fragmented = fullest.mem_bytes * foreseen.fragmented / allocated
    return StepMemory(
        0.0,
        0.0,
        0.0,
        0.0,
        0.0,
        0.0,
        foreseen.context,
        fragmented,
        rank=fullest.pipeline_rank,
        rehearsed=fullest.mem_bytes,
    )


def _by_place(job: Job, ranks: Sequence[RehearsedRank]) -> list[RehearsedRank]:
    """Return, for each place of the pipeline, the most seconds and bytes of its rehearsed ranks."""
    found = []
    for place in range(job.layout.pp):
        here = [rank for rank in ranks if rank.pipeline_rank == place]
        if not here:
            places = ", ".join(map(str, sorted({rank.pipeline_rank for rank in ranks})))
            raise ConfigError(
                f"rank {place} of the pipeline was not rehearsed (those at {places} were). Rehearse with --each-kind"
            )
        most = max(rank.seconds for rank in here), max(rank.mem_bytes for rank in here)
        found.append(RehearsedRank(place, *most, all(rank.has_messages for rank in here)))
    return found
