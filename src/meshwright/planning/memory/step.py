"""Estimate the bytes that a step holds besides model states: activations, logits and messages.

The estimate is what a run's first step is found to hold: the most bytes, at a time between two operators, of the
storages that operators make, other than parameters, gradients and the optimizer's. So inputs saved for backward,
intermediate results, and gradients of activations count; what an operator needs while it runs does not.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

from meshwright.planning.pipeline.schedules.action import Action, PipelineSchedule, Work

if TYPE_CHECKING:
    from meshwright.planning.plan import Plan


class MemoryUse(StrEnum):
    """The purpose for which bytes are held."""

    PARAMETERS = "parameters"
    GRADIENTS = "gradients"
    OPTIMIZER = "optimizer"
    ACTIVATIONS = "activations"
    LOGITS = "logits"
    COMMUNICATION = "communication"


@dataclass(frozen=True)
class MemoryEstimate:
    """An estimate of what a step holds besides model states.

    Attributes:
        ranks: for each rank of a pipeline (else for one that stands for all), the most bytes at a time of each kind;
            unknown kinds are left out, and the tuple is empty where nothing is known.
        why_not: the reason why something is not known.
    """

    ranks: tuple[Mapping[MemoryUse, int], ...]
    why_not: str = ""

    def of(self, rank: int | None = None) -> Mapping[MemoryUse, int]:
        """Return what a rank of the pipeline holds; by default the one that holds most."""
        if not self.ranks:
            return {}
        return max(self.ranks, key=lambda held: sum(held.values())) if rank is None else self.ranks[rank]


def not_estimated(plan: Plan) -> str:
    """Say why a plan's activations cannot be measured on fake tensors; "" where they can."""
    if plan.compiled:
        return "what compiled blocks keep is the compiler's choice"
    if plan.experts is not None:
        return (
            f"how many tokens come to a rank's experts (layout.ep = {plan.experts.ranks}) depends on what routers"
            f" choose"
        )
    if plan.tensor is not None and plan.tensor.async_tensor_parallel:
        return "products that overlap with messages (techniques.async_tensor_parallel) are computed in pieces"
    if plan.pipeline is not None and plan.pipeline.splits_backward:
        return f"the schedule {plan.pipeline.schedule} puts off gradients of weights"
    if plan.activation_checkpointing == "offload" and plan.device == "cuda":
        return "activations wait in host memory (techniques.activation_checkpointing = offload)"
    return ""


@dataclass(frozen=True)
class StageMemory:
    """The bytes, by kind, that one stage holds of a microbatch.

    Attributes:
        kept: bytes between its forward and its backward.
        forward: the most at a time in its forward.
        backward: the most at a time in its backward, ``kept`` included.
    """

    kept: Mapping[MemoryUse, int]
    forward: Mapping[MemoryUse, int]
    backward: Mapping[MemoryUse, int]


def over_schedule(stages: Mapping[int, StageMemory], actions: Sequence[Action]) -> Counter[MemoryUse]:
    """Return the most bytes of each kind at a time on a rank of a schedule whose backwards are whole."""
    most: Counter[MemoryUse] = Counter()
    for held in _moments(stages, actions):
        most |= held
    return most


def _moments(stages: Mapping[int, StageMemory], actions: Sequence[Action]) -> Iterator[Counter[MemoryUse]]:
    kept: Counter[MemoryUse] = Counter()
    for action in actions:
        stage = stages[action.stage]
        if action.work is Work.FORWARD:
            yield kept + Counter(stage.forward)
            kept = kept + Counter(stage.kept)
        else:
            kept = kept - Counter(stage.kept)
            yield kept + Counter(stage.backward)


def over_ranks(stages: Mapping[int, StageMemory], schedule: PipelineSchedule) -> list[Counter[MemoryUse]]:
    """Return the most bytes of each kind at a time, for each rank of a pipeline."""
    return [over_schedule(stages, actions) for actions in schedule.ranks]
