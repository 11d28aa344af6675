"""Estimate the memory of all ranks of a pipeline from dry runs of a few, with few microbatches."""

from __future__ import annotations

from collections.abc import Callable

from meshwright.planning.memory.step import RankMemory, composition
from meshwright.planning.pipeline.plan import PipelinePlan
from meshwright.planning.pipeline.schedules.simulate import peak_live

RunRank = Callable[[int, int], RankMemory]
"""(pipeline rank, microbatches) -> the bytes of its step."""
DIRECT = 16
"""Number of microbatches up to which a step is run as it is."""


def along_pipeline(pipeline: PipelinePlan, microbatches: int, run: RunRank) -> tuple[RankMemory, ...]:
    """Return the bytes of each rank of a pipeline.

    Ranks with equal stages differ by the number of microbatches whose activations they hold. So of these two are run,
    and the others lie on the line through them. Once all stages work, each further microbatch adds as much as the one
    before: nothing, a buffer that was sent, or (GPipe) its activations. So two short steps give a long one.
    """
    held = peak_live(pipeline.order(microbatches))
    alike: dict[tuple[object, ...], list[int]] = {}
    for rank in range(pipeline.ranks):
        alike.setdefault(composition(pipeline, rank), []).append(rank)
    found: dict[int, RankMemory] = {}
    for ranks in alike.values():
        # by what they hold; where that is equal, by their place, since messages travel for longer
        ordered = sorted(ranks, key=lambda rank: (held[rank], rank))
        for rank in ordered if len(ordered) < 3 else (ordered[0], ordered[-1]):
            found[rank] = _of_rank(pipeline, rank, microbatches, run)
        first, last = ordered[0], ordered[-1]
        measure = held if held[first] != held[last] else range(pipeline.ranks)
        for rank in ordered[1:-1]:
            share = (measure[rank] - measure[first]) / (measure[last] - measure[first])
            found.setdefault(rank, found[first].towards(found[last], share))
    return tuple(found[rank] for rank in range(pipeline.ranks))


def _of_rank(pipeline: PipelinePlan, rank: int, microbatches: int, run: RunRank) -> RankMemory:
    few = pipeline.legal(2 * pipeline.ranks)
    more = pipeline.legal(few + pipeline.ranks)
    if microbatches <= max(DIRECT, more):
        return run(rank, microbatches)
    return run(rank, few).towards(run(rank, more), (microbatches - few) / (more - few))
