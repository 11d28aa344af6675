"""Estimate the bytes of a step besides model states: activations, logits and messages.

The estimate stands for a number measured in a run's first step: the most bytes, between two operators, of the storages
that operators allocate, other than parameters, gradients and optimizer state. So tensors saved for backward,
intermediate results, and gradients of activations count; temporary buffers of an operator do not.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

from meshwright.core.devices import is_accelerator
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
    """An estimate of the bytes of a step besides model states.

    Attributes:
        ranks: for each rank of a pipeline (else for one that represents all), the most bytes at a time of each kind;
            unknown kinds are left out, and the tuple is empty if nothing is known.
        why_not: the reason why some bytes are unknown.
    """

    ranks: tuple[Mapping[MemoryUse, int], ...]
    why_not: str = ""

    def of(self, rank: int | None = None) -> Mapping[MemoryUse, int]:
        """Return the bytes of a rank of the pipeline, by kind; by default of the rank with most."""
        if not self.ranks:
            return {}
        return max(self.ranks, key=lambda held: sum(held.values())) if rank is None else self.ranks[rank]


def not_estimated(plan: Plan) -> str:
    """Return the reason why a plan's activations cannot be measured on fake tensors; "" if they can."""
    if plan.compiled:
        return "the compiler chooses what compiled blocks save"
    if plan.experts is not None:
        return (
            f"the number of tokens for a rank's experts (layout.ep = {plan.experts.ranks}) depends on what routers"
            f" choose"
        )
    if plan.tensor is not None and plan.tensor.async_tensor_parallel:
        return "products that overlap with messages (techniques.async_tensor_parallel) are computed in pieces"
    if plan.pipeline is not None and plan.pipeline.splits_backward:
        return f"the schedule {plan.pipeline.schedule} defers the gradients of weights"
    if plan.activation_checkpointing == "offload" and is_accelerator(plan.device):
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
