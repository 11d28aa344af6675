"""Count the bytes that a step sends, once a plan and a batch are known.

Costs per rank are those of bandwidth-optimal algorithms: (N-1)/N of the gathered or scattered tensor, twice that for an
all-reduce (Thakur, Rabenseifner, Gropp 2005). With P parameters: FSDP sends 2P - P_root - P_last in all-gathers (root
and last block stay gathered between forward and backward) and P in reduce-scatters; HSDP adds 2(P/S)(R-1)/R; DDP sends
2P.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from meshwright.core.axes import Axis

from .context.cut import cut_row, fetched_tokens
from .rules import check_batch
from .values import Batch, Collective

if TYPE_CHECKING:
    from .plan import Plan


@dataclass(frozen=True)
class Traffic:
    """Calls and bytes of one kind of collective, per rank and step; ``calls`` None: torch chooses the buckets."""

    op: str
    axis: str
    ranks: int
    calls: int | None
    bytes: float


def resolved(plan: Plan, batch: Batch) -> Batch:
    """Fill in the number of rows in a pipeline's microbatch if the batch has none."""
    if plan.pipeline is None or batch.microbatch_rows:
        return batch
    rows = batch.global_rows // plan.data_ranks
    return replace(batch, microbatch_rows=plan.pipeline.rows_per_microbatch(rows, batch.rows_together))


def _rows(plan: Plan, batch: Batch) -> int:
    """Count rows of a microbatch on one rank."""
    return -(-batch.global_rows // plan.data_ranks // batch.microbatches(plan.data_ranks))


def _tokens(plan: Plan, batch: Batch, filled: bool) -> int:
    """Count tokens of a microbatch on one rank; ``filled``: padded to a multiple of the tensor axis."""
    rows = _rows(plan, batch)
    ranks = plan.size(Axis.TP) if filled else 1
    return rows * -(-_own_tokens(plan, batch) // ranks) * ranks


def _own_tokens(plan: Plan, batch: Batch) -> int:
    """Count tokens of a row on the rank of the context axis that has most."""
    return max(own_tokens_of(plan, batch))


def own_tokens_of(plan: Plan, batch: Batch) -> list[int]:
    """Count tokens of a row, of one document, on each rank of the context axis."""
    if plan.context is None:
        return [batch.seq_len]
    runs = cut_row(plan.context.cut, batch.seq_len, plan.context.ranks)
    return [sum(stop - start for start, stop in mine) for mine in runs]


def _fetched_bytes(plan: Plan, batch: Batch, c: Collective) -> list[int]:
    """Count the bytes that each rank sends where queries fetch what they see by a rule, or gradients go back."""
    assert plan.context is not None and c.sees is not None
    sent = fetched_tokens(plan.context.cut, batch.seq_len, plan.context.ranks, c.sees)
    tokens = [sum(received) for received in zip(*sent, strict=True)] if c.returns else [sum(row) for row in sent]
    return [c.elements * _rows(plan, batch) * count * c.element_bytes for count in tokens]


def wire_bytes(op: str, tensor_bytes: float, ranks: int) -> float:
    """Count the bytes that one rank sends in one collective on a tensor of ``tensor_bytes`` (its larger side)."""
    if op == "send":
        return tensor_bytes
    return tensor_bytes * (ranks - 1) / ranks * (2 if op == "all_reduce" else 1)


def step_traffic(plan: Plan, batch: Batch) -> tuple[Traffic, ...]:
    """Count calls and bytes per rank of one step, by kind, axis and group size.

    Raises:
        ConfigError: the batch does not fit the plan's mesh.
    """
    check_batch(plan, batch)
    batch = resolved(plan, batch)
    repeats = batch.microbatches(plan.data_ranks)
    rows: dict[tuple, Traffic] = {}
    fetched: dict[tuple, list[float]] = {}
    for c in plan.collectives:
        times = repeats if c.per == "microbatch" else 1
        whole = plan.size(Axis.CP) if c.axis == Axis.CP else 1
        tokens = whole * _tokens(plan, batch, c.filled) if c.by_token else _rows(plan, batch) if c.by_row else 1
        calls = 1 if c.by_token or c.by_row else c.calls or 1
        moved = times * calls * wire_bytes(c.op, c.elements * tokens // c.among * c.element_bytes, c.ranks)
        if c.to_others:
            moved = times * c.elements * c.element_bytes
        key = (c.op, c.axis, c.ranks)
        if c.sees is not None:  # the rank counts that sends most in all of them together
            known = fetched.get(key, [0.0] * c.ranks)
            fetched[key] = [had + times * more for had, more in zip(known, _fetched_bytes(plan, batch, c), strict=True)]
            moved = max(fetched[key]) - max(known)
        before = rows.get(key, Traffic(*key, 0, 0.0))
        calls = None if c.calls is None or before.calls is None else before.calls + times * c.calls
        rows[key] = replace(before, calls=calls, bytes=before.bytes + moved)
    return tuple(rows.values())
