"""Bound the bytes that ranks hold in a step, on the device and in host memory.

Model states bound a step from below at the cost of arithmetic; an estimate bounds the step on both sides.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from meshwright.core.devices import is_accelerator
from meshwright.planning.collectives import resolved
from meshwright.planning.memory.states import Memory, plan_memory
from meshwright.planning.plan import Plan
from meshwright.planning.values import Batch

from .states import MemoryEstimate, MemoryUse

STATES_EXACT = 0.99
"""Model states were found within 1 % of their arithmetic (tests/distributed/test_memory.py)."""
ESTIMATE_EXACT = 0.03
"""Steps were found within 1.4 % of their estimate (docs/benchmarks.md); this is the goal of that comparison."""

LOST_BY_ALLOCATOR = 0.2
"""Fraction by which an allocator holds more than its blocks: the C library's heap has blocks of less than 32 MiB, and
was found to hold 12 and 16 % more than a model of 125M parameters has tensors (docs/benchmarks.md). Assumed of others.
"""


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


def bytes_of_states(plan: Plan, batch: Batch, *, state_tensors: int | None = None) -> list[RankBytes]:
    """Return a lower bound of each rank of a pipeline by its model states; without one, of one rank like all.

    Args:
        state_tensors: tensors of optimizer state for each parameter; None: the plan's.
    """
    microbatches = resolved(plan, batch).microbatches(plan.data_ranks)
    ranks = [None] if plan.pipeline is None else list(range(plan.pipeline.ranks))
    options = {"microbatches": microbatches, "state_tensors_per_parameter": state_tensors}
    return [_of_states(plan, plan_memory(plan, pipeline_rank=rank, **options)) for rank in ranks]


def _of_states(plan: Plan, memory: Memory) -> RankBytes:
    at_rest = {"parameters": memory.parameters, "gradients": memory.gradients, "optimizer": memory.optimizer}
    if memory.in_host_memory:
        return RankBytes(0, int(STATES_EXACT * sum(at_rest.values())), at_rest)
    whole = memory.gathered if plan.data.gathers_per_step else 0
    backward = {"gradients": memory.gradients_at_peak, "optimizer": memory.beside, "parameters gathered": whole}
    stepping = {"gradients": memory.gradients, "optimizer": memory.moving or memory.beside}
    parts = {"parameters": memory.parameters, **max(backward, stepping, key=lambda held: sum(held.values()))}
    return _placed(plan, STATES_EXACT * sum(parts.values()), memory.optimizer if memory.moving else 0, parts)


def bytes_at_least(
    plan: Plan, estimate: MemoryEstimate, *, activations: float = float("inf"), optimizer: bool = True
) -> list[RankBytes]:
    """Return a lower bound of each rank by an estimate that has ranks.

    Args:
        activations: bytes above which activations and logits do not count, such as another estimate's.
        optimizer: whether optimizer state is there in forward and backward, as from the second step on.
    """
    found = []
    for number, rank in enumerate(estimate.ranks):
        parts = {kind: size for kind, size in rank.peak.items() if optimizer or kind is not MemoryUse.OPTIMIZER}
        kept = sum(parts.get(kind, 0) for kind in (MemoryUse.ACTIVATIONS, MemoryUse.LOGITS))
        total = estimate.least[number] if estimate.least else rank.total
        total -= max(0, kept - activations) + (rank.total - sum(parts.values()))
        named = {} if estimate.least or kept > activations else {str(kind): size for kind, size in parts.items()}
        found.append(_placed(plan, (1 - ESTIMATE_EXACT) * total, rank.most.get(MemoryUse.HOST, 0), named))
    return found


def bytes_at_most(plan: Plan, estimate: MemoryEstimate) -> list[RankBytes]:
    """Return an upper bound of each rank by an estimate, with an allocator's losses and without what libraries take."""
    more, host = (1 + ESTIMATE_EXACT) * (1 + LOST_BY_ALLOCATOR), MemoryUse.HOST
    return [_placed(plan, more * rank.total, more * rank.most.get(host, 0), {}) for rank in estimate.ranks]


def _placed(plan: Plan, computing: float, host: float, parts: Mapping[str, int]) -> RankBytes:
    """Place what a device computes with; a CPU has it in host memory too."""
    known = {name: size for name, size in parts.items() if size}
    on_device = is_accelerator(plan.device)
    return RankBytes(int(computing), int(host), known) if on_device else RankBytes(0, int(computing + host), known)
