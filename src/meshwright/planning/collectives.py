"""The collectives of a step, and (with a batch) their bytes on the wire; known before any process group exists.

Costs per rank are those of bandwidth-optimal algorithms: (N-1)/N of the gathered or scattered tensor, twice that for an
all-reduce (Thakur, Rabenseifner, Gropp 2005). With P parameters: FSDP moves 2P - P_root - P_last in all-gathers (root and last
block stay gathered between forward and backward) and P in reduce-scatters; HSDP adds 2(P/S)(R-1)/R; DDP moves 2P.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from meshwright.core.axes import DATA_AXES, Axis

from .batch import Batch
from .expert_plan import ExpertPlan
from .plan import Collective, DataParallel, Plan, PrecisionPlan, Unit

COUNT_ELEMENTS = 6
"""float64 numbers in the all-reduce that opens a step: real tokens, their weight, routed tokens, microbatches, their square, ranks with a
bad batch."""


@dataclass(frozen=True)
class Traffic:
    """What one kind of collective moves in one step, per rank. ``calls`` is None where torch cuts buckets of its own choice."""

    op: str
    axis: str
    ranks: int
    calls: int | None
    bytes: float


def step_collectives(
    mesh: dict[str, int],
    units: tuple[Unit, ...],
    data: DataParallel,
    precision: PrecisionPlan,
    activations: tuple[Collective, ...] = (),
    trained_cuts: tuple[bool, ...] = (False,),
    experts: ExpertPlan | None = None,
    trained: int = 0,
) -> tuple[Collective, ...]:
    """All collectives of one ``forward_backward`` and ``optimizer_step``, by what they serve.

    Args:
        activations: those of the tensor and the expert axis, and of routers.
        trained_cuts: whether the tensor axis cuts trained parameters: False of those that it has whole, True of those that it cuts.
        trained: how many parameters are.
    """
    replicas, shards = (mesh.get(axis, 1) for axis in DATA_AXES)
    found = [*over_data_axes(mesh, "token count", COUNT_ELEMENTS, "float64")]
    if data.technique == "fully_shard":
        found += sharded_units(units, data, precision, shards, replicas, experts)
        per = "microbatch" if data.sync_grad_accum is True else "step"
        found += [replace(c, per=per) for c in over_data_axes(mesh, "parameters used", len(data.idle), "int64")]
    elif data.technique == "ddp":
        total = sum(unit.trainable_elements for unit in units)
        per = "microbatch" if data.sync_grad_accum else "step"
        found.append(Collective("all_reduce", Axis.DP_REPLICATE.value, replicas, "gradients", total, precision.master, per, calls=None))
        if data.idle:
            found.append(Collective("all_reduce", Axis.DP_REPLICATE.value, replicas, "parameters used", trained, "int32", per))
    found += activations
    found += over_data_axes(mesh, "loss", 1, "float64")
    own = experts if experts is not None and any(unit.experts and unit.trainable_elements for unit in units) else None
    return (*found, *step_norm(data, precision, shards, mesh.get(Axis.TP, 1), trained_cuts, own), *step_agreement(mesh))


def step_norm(
    data: DataParallel,
    precision: PrecisionPlan,
    shards: int,
    tensor_ranks: int,
    trained_cuts: tuple[bool, ...],
    experts: ExpertPlan | None,
):
    """One number over each axis that shards: of what the tensor axis has whole, of what it cuts, and of trained experts."""
    dtype = "float64" if precision.master == "float64" else "float32"
    sharded = data.technique == "fully_shard" and shards > 1
    for over_tensor in trained_cuts:
        if sharded:
            yield Collective("all_reduce", Axis.DP_SHARD.value, shards, "gradient norm", 1, dtype, "step")
        if over_tensor:
            yield Collective("all_reduce", Axis.TP.value, tensor_ranks, "gradient norm", 1, dtype, "step")
    if experts is not None and not _spans_as(experts, shards if sharded else 1, tensor_ranks, trained_cuts):
        for axis, ranks in ((Axis.EFSDP, experts.shards), (Axis.EP, experts.ranks)):
            if ranks > 1:
                yield Collective("all_reduce", axis.value, ranks, "gradient norm", 1, dtype, "step")


COPYING_AXES = (Axis.DP_REPLICATE, Axis.TP)
"""Over whose ranks something is replicated, and its norm computed by each for itself."""


def step_agreement(mesh: dict[str, int]):
    """One number over each axis of copies: the norm that all of them clip by, or that the step is skipped."""
    for axis in COPYING_AXES:
        if (ranks := mesh.get(axis, 1)) > 1:
            yield Collective("all_reduce", axis.value, ranks, "agreed norm", 1, "float64", "step")


def _spans_as(experts: ExpertPlan, shards: int, tensor_ranks: int, trained_cuts: tuple[bool, ...]) -> bool:
    """Whether experts are shared out over the whole world, and one axis shards something dense over it: one group, and one sum."""
    world = math.prod(size for _, size in experts.mesh)
    dense = [(shards, tensor_ranks if over_tensor else 1) for over_tensor in trained_cuts]
    return experts.ranks == world and any(sorted(sizes) == [1, world] for sizes in dense)


def over_data_axes(mesh: dict[str, int], unit: str, elements: int, dtype: str):
    """So many numbers, summed over the ranks with other rows."""
    for axis in DATA_AXES:
        if (ranks := mesh.get(axis, 1)) > 1 and elements:
            yield Collective("all_reduce", axis.value, ranks, unit, elements, dtype, "step")


def sharded_units(
    units: tuple[Unit, ...],
    data: DataParallel,
    precision: PrecisionPlan,
    shards: int,
    replicas: int,
    experts: ExpertPlan | None = None,
    *,
    postponed: bool = False,
):
    """Of fully_shard.

    Args:
        postponed: microbatches overlap in a pipeline: what is kept gathered is gathered once per step.
    """
    scatter_per = "microbatch" if data.sync_grad_accum else "step"
    reduce_per = "microbatch" if data.sync_grad_accum is True else "step"
    among = shards
    for unit in units:
        own = experts if unit.experts else None
        shard, shards = (Axis.DP_SHARD.value, among) if own is None else (Axis.EFSDP.value, own.shards)
        gather = Collective("all_gather", shard, shards, unit.name or "root", unit.elements, precision.compute, "microbatch")
        if shards > 1:
            kept = (postponed or data.gathers_per_step) and not unit.reshard_after_forward
            if unit.in_float8:  # beside other dtypes, torch sends bytes
                gather = replace(gather, elements=unit.gathered_bytes(precision.compute), dtype="uint8")
            yield replace(gather, per="step") if kept else gather
            if unit.gathers_in_backward:
                again = unit.reshard_after_forward
                yield replace(gather, ranks=shards if again is True else int(again))
            if unit.trainable_elements:
                yield replace(gather, op="reduce_scatter", elements=unit.trainable_elements, dtype=precision.reduce, per=scatter_per)
        if replicas > 1 and unit.trainable_elements:
            own, axis = unit.trainable_elements // shards, Axis.DP_REPLICATE.value
            yield Collective("all_reduce", axis, replicas, unit.name or "root", own, precision.reduce, reduce_per)


def resolved(plan: Plan, batch: Batch) -> Batch:
    """With the rows of a microbatch that a pipeline takes where nothing is said."""
    if plan.pipeline is None or batch.microbatch_rows:
        return batch
    return replace(batch, microbatch_rows=plan.pipeline.rows_per_microbatch(batch.global_rows // plan.data_ranks))


def _rows(plan: Plan, batch: Batch) -> int:
    """Of a microbatch on one rank."""
    return -(-batch.global_rows // plan.data_ranks // batch.microbatches(plan.data_ranks))


def _tokens(plan: Plan, batch: Batch, filled: bool) -> int:
    """Of a microbatch on one rank."""
    rows = _rows(plan, batch)
    ranks = plan.size(Axis.TP) if filled else 1
    return rows * -(-batch.seq_len // ranks) * ranks


def wire_bytes(op: str, tensor_bytes: float, ranks: int) -> float:
    """Bytes that one rank sends for one collective on a tensor of ``tensor_bytes`` (its larger side)."""
    if op == "send":
        return tensor_bytes
    return tensor_bytes * (ranks - 1) / ranks * (2 if op == "all_reduce" else 1)


def step_traffic(plan: Plan, batch: Batch) -> tuple[Traffic, ...]:
    """Calls and bytes per rank of one step, by kind, axis and group size.

    Raises:
        ConfigError: the batch does not fit the plan's mesh.
    """
    from .rules import check_batch

    check_batch(plan, batch)
    batch = resolved(plan, batch)
    repeats = batch.microbatches(plan.data_ranks)
    rows: dict[tuple, Traffic] = {}
    for c in plan.collectives:
        times = repeats if c.per == "microbatch" else 1
        tokens = _tokens(plan, batch, c.filled) if c.by_token else _rows(plan, batch) if c.by_row else 1
        calls = 1 if c.by_token or c.by_row else c.calls or 1
        moved = times * calls * wire_bytes(c.op, c.elements * tokens // c.among * c.element_bytes, c.ranks)
        key = (c.op, c.axis, c.ranks)
        before = rows.get(key, Traffic(*key, 0, 0.0))
        calls = None if c.calls is None or before.calls is None else before.calls + times * c.calls
        rows[key] = replace(before, calls=calls, bytes=before.bytes + moved)
    return tuple(rows.values())
