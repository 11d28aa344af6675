"""Resolve a ZeRO stage (arXiv 1910.02054), one request for what data ranks shard, into the other keys."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from meshwright.core.errors import ConfigError
from meshwright.planning.case import Case, Found
from meshwright.planning.layout import Layout
from meshwright.planning.shares import SHARDS, shares_of
from meshwright.planning.techniques import Techniques

if TYPE_CHECKING:
    from meshwright.planning.plan import Plan

SHARED_OUT = {
    1: "optimizer state",
    2: "optimizer state and gradients",
    3: "optimizer state, gradients and parameters",
}
"""Stage -> the model states that it shards over dp_shard × cp."""


def with_zero_stage(requested: Techniques, layout: Layout) -> Techniques:
    """Resolve the keys left "auto" by the stage; without a stage, by what suits the layout best."""
    stage = requested.zero_stage
    syncs = stage in (2, 3) and shares_of(layout).size(*SHARDS) > 1
    reshards = layout.pp == 1 if stage == "auto" else stage in (0, 3)
    if requested.reshard_after_forward == "auto":
        requested = replace(requested, reshard_after_forward=reshards)
    if requested.sync_grad_accum == "auto":
        requested = replace(
            requested, sync_grad_accum=("shard" if layout.dp_replicate > 1 else True) if syncs else False
        )
    return requested


def gathers_per_step(requested: Techniques, layout: Layout) -> bool:
    """Decide whether gathered parameters stay through all microbatches of a step."""
    return requested.zero_stage in (1, 2) or (layout.pp > 1 and requested.reshard_after_forward is False)


def zero_fits(case: Case) -> Found:
    """Require that the stage agrees with the mesh and with the keys that set a part of it."""
    t, layout = case.techniques, case.layout
    stage, shards = t.zero_stage, shares_of(layout).size(*SHARDS)
    if stage == 0 and layout.dp_shard > 1:
        yield ConfigError(
            f"techniques.zero_stage = 0 keeps everything whole on every rank, but layout.dp_shard = {layout.dp_shard}"
            f" cuts it. Set layout.dp_shard = 1 and layout.dp_replicate = {case.data_ranks}, or another stage."
        )
    if stage not in SHARED_OUT:
        return
    if t.data_parallel == "ddp":
        yield ConfigError(
            f"techniques.zero_stage = {stage} shards {SHARED_OUT[stage]}, and techniques.data_parallel = ddp keeps all"
            f" of it whole. Leave one of them out."
        )
    if case.data_ranks > 1 and shards == 1:
        yield ConfigError(
            f"techniques.zero_stage = {stage} shards {SHARED_OUT[stage]} over layout.dp_shard, which is 1 here beside"
            f" layout.dp_replicate = {layout.dp_replicate}. Set layout.dp_shard = {case.data_ranks} and"
            f" layout.dp_replicate = 1 (or a part of each), or techniques.zero_stage = 0."
        )
    keeps = t.reshard_after_forward is False
    if keeps != (stage < 3):
        does = (
            "frees gathered parameters after each use"
            if stage == 3
            else "keeps gathered parameters through all microbatches of a step"
        )
        yield ConfigError(
            f"techniques.zero_stage = {stage} {does}, and techniques.reshard_after_forward ="
            f" {str(t.reshard_after_forward).lower()} says"
            f' otherwise. Leave it at "auto".'
        )
    syncs = t.sync_grad_accum is not False
    if shards > 1 and syncs != (stage > 1):
        does = (
            "shards gradients with every microbatch" if stage > 1 else "keeps whole gradients until the last microbatch"
        )
        yield ConfigError(
            f"techniques.zero_stage = {stage} {does}, and techniques.sync_grad_accum ="
            f" {str(t.sync_grad_accum).lower()} says otherwise."
            f' Leave it at "auto".'
        )


def zero_notes(requested: Techniques, layout: Layout, technique: str) -> Iterator[str]:
    """Note the traffic of a step by stage, with P parameter elements."""
    stage, ranks = requested.zero_stage, shares_of(layout).batch_ranks
    if stage not in ("auto", 0) and ranks == 1:
        yield f"zero_stage = {stage}: there is one data rank, so nothing is sharded"
    elif stage == 1:
        yield "ZeRO-1: 2P travel per step, whatever its microbatches; whole gradients are kept while they accumulate"
    elif stage == 2:
        yield "ZeRO-2: P + m·P travel per step of m microbatches; each rank keeps its shard of the gradients"
    elif stage == 3:
        yield "ZeRO-3: 3P travel per microbatch; each rank keeps its shard of parameters and gradients"
    elif stage == "auto" and shares_of(layout, technique).shards > 1 and requested.sync_grad_accum is False:
        yield (
            "gradients of several microbatches accumulate whole: P elements on every rank; zero_stage = 2 or 3"
            " keeps shards of them"
        )


def stage_of(plan: Plan) -> int:
    """Return the ZeRO stage of a plan: 0 (nothing sharded) to 3."""
    data = plan.data
    if data.technique != "fully_shard" or plan.shares.shards == 1:
        return 0
    if not data.gathers_per_step:
        return 3
    return 2 if data.sync_grad_accum else 1
