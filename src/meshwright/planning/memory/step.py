"""Describe the memory of a step: by purpose, at its peak, for each rank of a pipeline.

Numbers stand for those measured in a run: the bytes, between two operators, of all storages that are live. Temporary
buffers of an operator do not count.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

from meshwright.core.devices import is_accelerator

if TYPE_CHECKING:
    from meshwright.planning.pipeline.plan import PipelinePlan
    from meshwright.planning.plan import Plan


class MemoryUse(StrEnum):
    """The purpose for which bytes are held."""

    PARAMETERS = "parameters"
    GRADIENTS = "gradients"
    OPTIMIZER = "optimizer"
    ACTIVATIONS = "activations"
    LOGITS = "logits"
    COMMUNICATION = "communication"
    BUFFERS = "buffers"
    HOST = "host memory"
    """Bytes that a plan for an accelerator keeps in host memory; no part of a peak on the device."""


@dataclass(frozen=True)
class RankMemory:
    """The bytes that a rank holds in a step, by kind.

    Attributes:
        most: for each kind the most at a time.
        peak: at the time at which all kinds together are most.
    """

    most: Mapping[MemoryUse, int]
    peak: Mapping[MemoryUse, int]

    @property
    def total(self) -> int:
        """The most of all kinds together."""
        return sum(self.peak.values())

    def towards(self, other: RankMemory, share: float) -> RankMemory:
        """Return a rank's bytes on the line through two: 0 gives this one's, 1 the other's."""

        def between(here: Mapping[MemoryUse, int], there: Mapping[MemoryUse, int]) -> dict[MemoryUse, int]:
            return {
                kind: round(here.get(kind, 0) + share * (there.get(kind, 0) - here.get(kind, 0)))
                for kind in {**here, **there}
            }

        return RankMemory(between(self.most, other.most), between(self.peak, other.peak))


@dataclass(frozen=True)
class MemoryEstimate:
    """An estimate of the memory of a step.

    Attributes:
        ranks: one for each rank of a pipeline (else one that represents all); empty if nothing is known.
        least: where the bytes are only known to lie in a range, the lower end of each rank's total; ``ranks`` have the
            upper one. Empty otherwise.
        notes: what was assumed, and the reason for a range.
        why_not: the reason why nothing is known.
    """

    ranks: tuple[RankMemory, ...]
    why_not: str = ""
    least: tuple[int, ...] = ()
    notes: tuple[str, ...] = ()

    def of(self, rank: int | None = None) -> RankMemory:
        """Return the bytes of a rank of the pipeline; by default of the rank with most."""
        if not self.ranks:
            return RankMemory({}, {})
        return self.ranks[self.fullest if rank is None else rank]

    @property
    def fullest(self) -> int:
        """The rank of the pipeline with most bytes."""
        return max(range(len(self.ranks)), key=lambda rank: self.ranks[rank].total)


def assumptions(plan: Plan) -> Iterator[str]:
    """Yield the assumptions of an estimate of a plan's memory."""
    if plan.compiled:
        yield (
            "the compiler chooses what compiled blocks keep for their backward: at least their inputs, at most what"
            " they keep uncompiled"
        )
    if plan.experts is not None:
        yield "routers are taken to give all experts as many tokens; uneven ones need more on some ranks"
    if plan.tensor is not None and plan.tensor.async_tensor_parallel:
        yield "products that overlap with messages (techniques.async_tensor_parallel) count as those that do not"
    if is_accelerator(plan.device):
        yield (
            "activations are those that the CPU's operators keep; the device's context, its libraries' workspaces and"
            " fragmentation come on top"
        )


def composition(pipeline: PipelinePlan, rank: int) -> tuple[object, ...]:
    """Return a key that is equal for ranks whose stages hold and send equally much of a microbatch."""
    kinds = {block: number for number, kind in enumerate(pipeline.kinds) for block in kind.blocks}
    here = pipeline.stages_on(rank)
    ends = -1, len(pipeline.stages)
    return tuple(
        (
            tuple(kinds[block] for block in pipeline.stages[number].blocks),
            *("end" if beside in ends else beside in here for beside in (number - 1, number + 1)),
        )
        for number in here
    )
