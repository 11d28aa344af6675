"""List the collectives of a step, batch-free, before any process group exists."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import replace

from meshwright.core.axes import Axis

from .experts.plan import ExpertPlan
from .shares import BATCH, REPLICAS, TOKENS, Shares
from .values import Collective, DataParallel, PrecisionPlan, Unit

COUNT_ELEMENTS = 8
"""Number of float64 values in the all-reduce that opens a step.

They are: real tokens, their weight, routed tokens, microbatches, their square, ranks with a bad batch; where rows are
cut, one more: ranks that bring their own tokens alone.
"""


def step_collectives(
    shares: Shares,
    units: tuple[Unit, ...],
    data: DataParallel,
    precision: PrecisionPlan,
    activations: tuple[Collective, ...] = (),
    trained_cuts: tuple[bool, ...] = (False,),
    experts: ExpertPlan | None = None,
    trained: int = 0,
) -> tuple[Collective, ...]:
    """List all collectives of one ``forward_backward`` and ``optimizer_step``, by their purpose.

    Args:
        activations: the collectives of the tensor and the expert axis, and of routers.
        trained_cuts: whether the tensor axis cuts trained parameters: False for those it leaves whole, True for those
            it cuts.
        trained: number of trained parameters.
    """
    found = [*token_count(shares)]
    if data.technique == "fully_shard":
        found += sharded_units(units, data, precision, shares, experts)
        per = "microbatch" if data.sync_grad_accum is True else "step"
        found += [replace(c, per=per) for c in over_batch(shares, "parameters used", len(data.idle), "int64")]
    elif data.technique == "ddp":
        per = "microbatch" if data.sync_grad_accum else "step"
        over, ranks = Axis.DP_REPLICATE.value, shares.replicas
        for dtype in dict.fromkeys(unit.dtype for unit in units if unit.trainable_elements):
            total = sum(unit.trainable_elements for unit in units if unit.dtype == dtype)
            found.append(Collective("all_reduce", over, ranks, "gradients", total, dtype, per, calls=None))
        if data.idle:
            found.append(Collective("all_reduce", over, ranks, "parameters used", trained, "int32", per))
    found += activations
    found += over_batch(shares, "loss", 1, "float64")
    own = experts if experts is not None and any(unit.experts and unit.trainable_elements for unit in units) else None
    trained_in = {unit.dtype for unit in units if unit.trainable_elements}
    return (*found, *step_norm(trained_in, shares, trained_cuts, own), *step_agreement(shares))


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
    if experts is not None and not _spans_as(experts, shares.shards, tensor_ranks, trained_cuts):
        for axis, ranks in ((Axis.EFSDP, experts.shards), (Axis.EP, experts.ranks)):
            if ranks > 1:
                yield Collective("all_reduce", axis.value, ranks, "gradient norm", 1, dtype, "step")


def step_agreement(shares: Shares):
    """List one number per axis of copies: the norm by which all copies clip, or that the step is skipped."""
    for axis in shares.copies:
        if (ranks := shares.size(axis)) > 1:
            yield Collective("all_reduce", axis.value, ranks, "agreed norm", 1, "float64", "step")


def _spans_as(experts: ExpertPlan, shards: int, tensor_ranks: int, trained_cuts: tuple[bool, ...]) -> bool:
    """Decide whether experts and dense parameters are sharded over the same group, the world: one sum for both."""
    world = math.prod(size for _, size in experts.mesh)
    dense = [(shards, tensor_ranks if over_tensor else 1) for over_tensor in trained_cuts]
    return experts.ranks == world and any(sorted(sizes) == [1, world] for sizes in dense)


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
