"""Bound the bytes that ranks hold in a step from below and from above, on the device and in host memory.

Model states and activations have their peaks at different moments: their sum is an upper bound. The lower bound takes
the larger of two moments, the last gradient's (all model states) and the last forward's end (all activations).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from meshwright.core.devices import CPU, is_accelerator
from meshwright.planning.memory.states import Memory, memory_of_ranks
from meshwright.planning.memory.step import MemoryEstimate, MemoryUse
from meshwright.planning.plan import Plan
from meshwright.planning.traffic import resolved
from meshwright.planning.values import Batch

STATES_EXACT = 0.99
"""Model states were found within 1 % of their estimate (tests/distributed/test_memory.py)."""
ACTIVATIONS_EXACT = {CPU: 0.97}
"""Activations were found within 3 % of theirs on the CPU (tests/distributed/test_memory_estimate.py)."""
ACTIVATIONS_UNSEEN = 0.9
"""The same on devices where they were never compared: assumed."""


@dataclass(frozen=True)
class RankBytes:
    """Bytes of one rank at its fullest.

    Attributes:
        device: in the memory of an accelerator.
        host: in the memory of the host.
        parts: the summands, by name.
    """

    device: int
    host: int
    parts: Mapping[str, int] = field(default_factory=dict)


def microbatches_of(plan: Plan, batch: Batch) -> int:
    """Return the forwards of a step on each rank."""
    return resolved(plan, batch).microbatches(plan.data_ranks)


def least_bytes(
    plan: Plan,
    batch: Batch,
    estimate: MemoryEstimate | None = None,
    *,
    most_activations: float = float("inf"),
    steps: int = 2,
    state_tensors: int | None = None,
) -> list[RankBytes]:
    """Return lower bounds for each rank of a pipeline; without one, for one rank that is like all.

    Args:
        estimate: activations and logits; without it, or where they are unknown, they count as none.
        most_activations: bytes above which activations and logits do not count, such as another estimate's.
        steps: optimizer steps of the run; there is no optimizer state in the first one's forward.
        state_tensors: tensors of optimizer state for each parameter; None: the plan's.
    """
    number = microbatches_of(plan, batch)
    ranks = memory_of_ranks(plan, microbatches=number, state_tensors_per_parameter=state_tensors)
    exact = ACTIVATIONS_EXACT.get(plan.device, ACTIVATIONS_UNSEEN)
    return [
        _least(plan, memory, int(min(exact * held, most_activations)), steps)
        for memory, held in zip(ranks, _at_once(plan, estimate, len(ranks)), strict=True)
    ]


def _at_once(plan: Plan, estimate: MemoryEstimate | None, ranks: int) -> list[int]:
    """Return activations and logits that are surely there together: where blocks are recomputed, the most of one kind
    may come when the other is gone."""
    if estimate is None or not estimate.ranks:
        return [0] * ranks
    apart = bool(plan.checkpointed) or plan.pipeline is not None
    return [(max if apart else sum)((*held.values(), 0)) for held in estimate.ranks]


def _least(plan: Plan, memory: Memory, activations: int, steps: int) -> RankBytes:
    state = memory.beside if steps > 1 else 0
    before = memory.kept_between_steps + (memory.accumulated if plan.pipeline is None else 0)
    whole = memory.gathered if plan.data.gathers_per_step else 0
    if memory.in_host_memory:
        at_rest = memory.parameters + memory.gradients + memory.optimizer
        parts = {"parameters": memory.parameters, "gradients": memory.gradients, "optimizer": memory.optimizer}
        if is_accelerator(plan.device):
            return RankBytes(activations, int(STATES_EXACT * at_rest), {**parts, "activations": activations})
        return RankBytes(0, int(STATES_EXACT * at_rest), parts)
    backward = memory.gradients_at_peak + memory.beside + whole
    stepping = memory.gradients + (memory.moving or memory.beside)
    states = STATES_EXACT * (memory.parameters + max(backward, stepping))
    computing = STATES_EXACT * (memory.parameters + state + before + whole) + activations
    if computing > states:
        parts = {"optimizer": state, "gradients": before, "activations": activations}
    else:
        parts = {"optimizer": memory.moving or memory.beside, "gradients": memory.gradients_at_peak}
    parts = {"parameters": memory.parameters + whole, **parts}
    return _placed(plan, int(max(states, computing)), memory.optimizer if memory.moving else 0, parts)


def most_bytes(
    plan: Plan, batch: Batch, estimate: MemoryEstimate, *, state_tensors: int | None = None
) -> list[RankBytes]:
    """Return upper bounds, without the allocator's losses and what libraries take, for each rank as ``least_bytes``."""
    number = microbatches_of(plan, batch)
    ranks = memory_of_ranks(plan, microbatches=number, state_tensors_per_parameter=state_tensors)
    held: Sequence[Mapping[MemoryUse, int]] = estimate.ranks or [{}] * len(ranks)
    return [_most(plan, memory, sum(uses.values())) for memory, uses in zip(ranks, held, strict=True)]


def _most(plan: Plan, memory: Memory, activations: int) -> RankBytes:
    if memory.in_host_memory:
        computing = memory.gathered + memory.gradients_at_peak + memory.reducing + activations
        return _placed(plan, computing, memory.parameters + memory.gradients + memory.optimizer, {})
    return _placed(plan, memory.at_peak + activations, memory.optimizer if memory.moving else 0, {})


def _placed(plan: Plan, computing: int, host: int, parts: Mapping[str, int]) -> RankBytes:
    """Place what a device computes with; a CPU has it in host memory too."""
    known = {name: size for name, size in parts.items() if size}
    return RankBytes(computing, host, known) if is_accelerator(plan.device) else RankBytes(0, computing + host, known)
