"""Compare a step's memory with the plan's estimate, and name the switches that save most."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from meshwright.core.devices import is_accelerator
from meshwright.core.units import bytes_text
from meshwright.planning.memory.states import plan_memory
from meshwright.planning.memory.step import MemoryUse
from meshwright.planning.optimizer.plan import ROOM
from meshwright.planning.plan import Plan

KINDS = {
    MemoryUse.PARAMETERS: "parameters, gathered ones too",
    MemoryUse.GRADIENTS: "gradients",
    MemoryUse.OPTIMIZER: "optimizer",
    MemoryUse.ACTIVATIONS: "activations",
    MemoryUse.LOGITS: "logits",
    MemoryUse.COMMUNICATION: "messages",
    MemoryUse.BUFFERS: "buffers",
}
SUGGESTED = 2
NOTHING: Mapping[MemoryUse, int] = {}


@dataclass(frozen=True)
class MemoryShares:
    """The cut of a rank's step into microbatches.

    Attributes:
        rows: rows of a microbatch.
        microbatches: microbatches of a step.
    """

    rows: int
    microbatches: int


def estimated(plan: Plan, shares: MemoryShares, kept: Mapping[MemoryUse, int] = NOTHING) -> dict[MemoryUse, int]:
    """Return bytes at peak by kind, for the kinds that a plan estimates.

    Args:
        kept: the most bytes of each kind by a dry run (``RankMemory.most``); without them the model states alone.
    """
    m = plan_memory(plan, microbatches=shares.microbatches)
    return {
        MemoryUse.PARAMETERS: m.parameters + m.gathered,
        MemoryUse.GRADIENTS: m.gradients_at_peak,
        MemoryUse.OPTIMIZER: m.optimizer,
        **kept,
    }


def memory_table(
    found: Mapping[MemoryUse, int], plan: Plan, shares: MemoryShares, kept: Mapping[MemoryUse, int] = NOTHING
) -> str:
    """Format one line for each kind: the measured peak, and the plan's estimate if it has one."""
    planned = estimated(plan, shares, kept)
    rows = [
        (
            text + _where(kind, plan),
            bytes_text(found[kind]) if kind in found else "-",
            bytes_text(planned[kind]) if kind in planned else "-",
        )
        for kind, text in KINDS.items()
        if kind in found or kind in planned
    ]
    head = ("the most at a time of", "found", "plan")
    widths = [max(len(row[column]) for row in (head, *rows)) for column in range(3)]
    return "\n".join(
        f"  {what:<{widths[0]}}  {here:>{widths[1]}}  {there:>{widths[2]}}" for what, here, there in (head, *rows)
    )


def _where(kind: MemoryUse, plan: Plan) -> str:
    return (
        ", in host memory"
        if kind is MemoryUse.OPTIMIZER and (plan.optimizer.in_host_memory or plan.data.cpu_offload)
        else ""
    )


def suggestions(
    found: Mapping[MemoryUse, int], plan: Plan, shares: MemoryShares, kept: Mapping[MemoryUse, int] = NOTHING
) -> list[str]:
    """Return the switches that would save most on this rank, best first, with the approximate bytes.

    A failed step has measured less than its peak: then the estimate counts.
    """
    planned = estimated(plan, shares, kept)
    known = {kind: max(found.get(kind, 0), planned.get(kind, 0)) for kind in (*found, *planned)}
    best = sorted(_savings(known, plan, shares), reverse=True)
    return [f"{switch} saves about {bytes_text(saved)}" for saved, switch in best[:SUGGESTED] if saved > 0]


def _savings(held: Mapping[MemoryUse, int], plan: Plan, shares: MemoryShares) -> Iterator[tuple[int, str]]:
    activations, logits = held.get(MemoryUse.ACTIVATIONS, 0), held.get(MemoryUse.LOGITS, 0)
    states = sum(held[kind] for kind in (MemoryUse.PARAMETERS, MemoryUse.GRADIENTS, MemoryUse.OPTIMIZER))
    data, ranks = plan.data, plan.data_ranks
    if shares.rows > 1:
        yield (activations + logits) // 2, f"batch.microbatch = {max(1, shares.rows // 2)}"
    if plan.activation_checkpointing == "none" and plan.units[1:]:
        blocks = len([unit for unit in plan.units if unit.name and not unit.experts])
        yield activations - activations // max(blocks, 1), 'techniques.activation_checkpointing = "full"'
    if plan.loss is None:
        yield logits - logits // 8, "techniques.loss_chunks = 8"
    if data.technique != "fully_shard" and ranks > 1:
        yield states - states // ranks, f"layout.dp_shard = {ranks} with layout.dp_replicate = 1"
    elif data.gathers_per_step:
        whole = held[MemoryUse.PARAMETERS]
        yield whole - whole // max(plan.size("dp_shard"), 1), "techniques.zero_stage = 3"
    splits = plan.pipeline is not None and plan.pipeline.splits_backward
    if (
        data.technique == "fully_shard"
        and shares.microbatches > 1
        and not (data.sync_grad_accum or splits)
        and plan.size("dp_shard") > 1
    ):
        whole = held[MemoryUse.GRADIENTS]
        switch = "techniques.zero_stage = 2" if data.gathers_per_step else "techniques.sync_grad_accum = true"
        yield whole - whole // plan.size("dp_shard"), switch
    if is_accelerator(plan.device) and not data.cpu_offload:
        m = plan_memory(plan, microbatches=shares.microbatches)
        if not plan.optimizer.in_host_memory:
            yield m.parameters + m.optimizer + m.gradients, "techniques.cpu_offload = true"
            yield m.optimizer - min(m.optimizer, ROOM), 'techniques.cpu_offload = "optimizer"'


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error is a failed allocation by torch, on a GPU or the host."""
    import torch

    words = ("out of memory", "not enough memory", "can't allocate memory", "cannot allocate memory")
    is_torchs = isinstance(error, (torch.OutOfMemoryError, MemoryError))
    return is_torchs or (isinstance(error, RuntimeError) and any(word in str(error).lower() for word in words))


def out_of_memory(
    error: BaseException,
    found: Mapping[MemoryUse, int],
    plan: Plan,
    shares: MemoryShares,
    kept: Mapping[MemoryUse, int] = NOTHING,
) -> str:
    """Return the error text for a step that ran out of memory."""
    what = str(error).splitlines()[0] if str(error) else type(error).__name__
    better = suggestions(found, plan, shares, kept)
    ways = (
        f"What would save most here: {'; '.join(better)}." if better else "Give the model more ranks, or shorter rows."
    )
    return f"out of memory: {what}\n{memory_table(found, plan, shares, kept)}\n{ways}"
