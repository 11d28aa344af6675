"""Accumulate gradients, and decide when they are communicated, for every kind of parallel model."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from meshwright.planning.plan import Plan

from . import fully_sharded, replicated


def context(module: nn.Module, plan: Plan, is_last_microbatch: bool) -> AbstractContextManager[None]:
    """Delay gradient communication to the last microbatch, unless the plan syncs each; restored on exceptions."""
    if plan.data.technique == "fully_shard":
        return fully_sharded.accumulation(module, plan.data, is_last_microbatch)
    if isinstance(module, DistributedDataParallel):
        return replicated.accumulation(module, plan.data, is_last_microbatch)
    return nullcontext()
