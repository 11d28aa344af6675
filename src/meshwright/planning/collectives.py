"""List the collectives of a step before any process group exists, and count the bytes that they send.

Costs per rank are those of bandwidth-optimal algorithms: (N-1)/N of the gathered or scattered tensor, twice that for an
all-reduce (Thakur, Rabenseifner, Gropp 2005). With P parameters: FSDP sends 2P - P_root - P_last in all-gathers (root
and last block stay gathered between forward and backward) and P in reduce-scatters; HSDP adds 2(P/S)(R-1)/R; DDP sends
2P.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from meshwright.core.axes import Axis
from meshwright.planning.context.plan import cut_row, fetched_tokens
from meshwright.planning.experts import ExpertPlan
from meshwright.planning.layout import BATCH, REPLICAS, TOKENS, Shares
from meshwright.planning.plan import Plan
from meshwright.planning.rules import check_batch
from meshwright.planning.values import Batch, Collective, DataParallel, PrecisionPlan, Unit

# --- list the collectives of a step, batch-free, before any process group exists

COUNT_ELEMENTS = 8
"""Number of float64 values in the all-reduce that opens a step.

They are those of ``distributed/step/opening.py:StepCounts``; where rows are cut, one more: ranks that bring their own
tokens alone.
"""


def step_collectives(
    plan: Plan, activations: Iterable[Collective], trained_cuts: tuple[bool, ...], trained: int
) -> tuple[Collective, ...]:
    """List the collectives of one ``forward_backward`` and of the norm and agreement behind it, by their purpose.

    Args:
        activations: the collectives of the tensor and the expert axis, and of routers.
        trained_cuts: whether the tensor axis cuts trained parameters: False for those it leaves whole, True for those
            it cuts.
        trained: number of trained parameters.
    """
    shares, units, data, experts = plan.shares, plan.units, plan.data, plan.experts
    found = [*token_count(shares)]
    if data.technique == "fully_shard":
        found += [*sharded_units(units, data, plan.precision, shares, experts), *idle_agreement(shares, data)]
    elif data.technique == "ddp":
        per = "microbatch" if data.sync_grad_accum else "step"
        over, ranks = Axis.DP_REPLICATE.value, shares.replicas
        for dtype in dict.fromkeys(unit.dtype for unit in units if unit.trainable_elements):
            total = sum(unit.trainable_elements for unit in units if unit.dtype == dtype)
            found.append(Collective("all_reduce", over, ranks, "gradients", total, dtype, per, calls=None))
        if data.idle:
            found.append(Collective("all_reduce", over, ranks, "parameters used", trained, "int32", per))
    found += [*activations, *over_batch(shares, "loss", 1, "float64")]
    own = experts if any(unit.experts and unit.trainable_elements for unit in units) else None
    trained_in = {unit.dtype for unit in units if unit.trainable_elements}
    return (*found, *step_norm(trained_in, shares, trained_cuts, own), *step_agreement(shares))


def idle_agreement(shares: Shares, data: DataParallel, idle: int | None = None) -> Iterator[Collective]:
    """List the all-reduces by which ranks tell which of the idle parameters, by default all, have a gradient."""
    per = "microbatch" if data.sync_grad_accum is True else "step"
    number = len(data.idle) if idle is None else idle
    return (replace(c, per=per) for c in over_batch(shares, "parameters used", number, "int64"))


def token_count(shares: Shares) -> Iterator[Collective]:
    """List the all-reduces that open a step."""
    return over_batch(shares, "token count", COUNT_ELEMENTS + (shares.size(*TOKENS) > 1), "float64")


def step_norm(trained_in: Iterable[str], shares: Shares, trained_cuts: tuple[bool, ...], experts: ExpertPlan | None):
    """List the norm's all-reduces, one number per sharding axis: of whole, of cut and of expert parameters.

    Args:
        trained_in: dtypes of the trained parameters.
    """
    dtype = "float64" if "float64" in trained_in else "float32"
    tensor_ranks = shares.size(Axis.TP)
    for over_tensor in trained_cuts:
        if shares.shards > 1:
            yield Collective("all_reduce", Axis.DP_SHARD.value, shares.shards, "gradient norm", 1, dtype, "step")
        if over_tensor:
            yield Collective("all_reduce", Axis.TP.value, tensor_ranks, "gradient norm", 1, dtype, "step")
    if experts is None:
        return
    # experts and dense parameters that are sharded over the same group, the world, have one sum
    world = math.prod(size for _, size in experts.mesh)
    dense = [sorted((shares.shards, tensor_ranks if over_tensor else 1)) for over_tensor in trained_cuts]
    if not (experts.ranks == world and [1, world] in dense):
        for axis, ranks in ((Axis.EFSDP, experts.shards), (Axis.EP, experts.ranks)):
            if ranks > 1:
                yield Collective("all_reduce", axis.value, ranks, "gradient norm", 1, dtype, "step")


def step_agreement(shares: Shares):
    """List one number per axis of copies: the norm by which all copies clip, or that the step is skipped."""
    for axis in shares.copies:
        if (ranks := shares.size(axis)) > 1:
            yield Collective("all_reduce", axis.value, ranks, "agreed norm", 1, "float64", "step")


def over_batch(shares: Shares, unit: str, elements: int, dtype: str) -> Iterator[Collective]:
    """List the all-reduces of ``elements`` numbers over the ranks with other tokens."""
    for axis in BATCH:
        if (ranks := shares.size(axis)) > 1 and elements:
            yield Collective("all_reduce", axis.value, ranks, unit, elements, dtype, "step")


def sharded_units(
    units: tuple[Unit, ...],
    data: DataParallel,
    precision: PrecisionPlan,
    shares: Shares,
    experts: ExpertPlan | None = None,
    *,
    postponed: bool = False,
):
    """List the collectives of fully_shard.

    Args:
        postponed: microbatches overlap in a pipeline, so units that stay gathered are gathered once per step.
    """
    scatter_per = "microbatch" if data.sync_grad_accum else "step"
    reduce_per = "microbatch" if data.sync_grad_accum is True else "step"
    for unit in units:
        own = experts if unit.experts else None
        shard, shards = (Axis.DP_SHARD.value, shares.shards) if own is None else (Axis.EFSDP.value, own.shards)
        name, reduced_in = unit.name or "root", precision.reduced_in(unit.dtype)
        elements = unit.bytes_gathered if unit.gathered_in == "uint8" else unit.elements
        gather = Collective("all_gather", shard, shards, name, elements, unit.gathered_in, "microbatch")
        if shards > 1:
            kept = (postponed or data.gathers_per_step) and not unit.reshard_after_forward
            yield replace(gather, per="step") if kept else gather
            if unit.gathers_in_backward:
                again = unit.reshard_after_forward
                yield replace(gather, ranks=shards if again is True else int(again))
            if unit.trainable_elements:
                yield replace(
                    gather,
                    op="reduce_scatter",
                    elements=unit.trainable_elements,
                    dtype=reduced_in,
                    per=scatter_per,
                )
        replicas = shares.replicas if own is None else shares.size(*REPLICAS)
        if replicas > 1 and unit.trainable_elements:
            kept, axis = unit.trainable_elements // shards, Axis.DP_REPLICATE.value
            yield Collective("all_reduce", axis, replicas, name, kept, reduced_in, reduce_per)


# --- count the bytes that a step sends, once a plan and a batch are known


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


def own_tokens_of(plan: Plan, batch: Batch) -> list[int]:
    """Count tokens of a row, of one document, on each rank of the context axis."""
    if plan.context is None:
        return [batch.seq_len]
    runs = cut_row(plan.context.cut, batch.seq_len, plan.context.ranks)
    return [sum(stop - start for start, stop in mine) for mine in runs]


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
    on_rank = -(-batch.global_rows // plan.data_ranks // repeats)  # rows of a microbatch
    own_tokens = max(own_tokens_of(plan, batch))
    rows: dict[tuple, Traffic] = {}
    fetched: dict[tuple, list[float]] = {}
    for c in plan.collectives:
        times = repeats if c.per == "microbatch" else 1
        tokens = on_rank if c.by_row else 1
        if c.by_token:
            parts = plan.size(Axis.TP) if c.filled else 1  # padded to a multiple of the tensor axis
            tokens = on_rank * -(-own_tokens // parts) * parts * (plan.size(Axis.CP) if c.axis == Axis.CP else 1)
        calls = 1 if c.by_token or c.by_row else c.calls or 1
        moved = times * calls * wire_bytes(c.op, c.elements * tokens // c.among * c.element_bytes, c.ranks)
        if c.to_others:
            moved = times * c.elements * c.element_bytes
        key = (c.op, c.axis, c.ranks)
        if c.sees is not None:  # the rank counts that sends most in all of them together
            assert plan.context is not None
            sent = fetched_tokens(plan.context.cut, batch.seq_len, plan.context.ranks, c.sees)
            # gradients go back to the ranks that sent
            of_ranks = [sum(received) for received in zip(*sent, strict=True)] if c.returns else map(sum, sent)
            known = fetched.get(key, [0.0] * c.ranks)
            each = times * c.elements * on_rank * c.element_bytes
            fetched[key] = [had + each * count for had, count in zip(known, of_ranks, strict=True)]
            moved = max(fetched[key]) - max(known)
        before = rows.get(key, Traffic(*key, 0, 0.0))
        calls = None if c.calls is None or before.calls is None else before.calls + times * c.calls
        rows[key] = replace(before, calls=calls, bytes=before.bytes + moved)
    return tuple(rows.values())
