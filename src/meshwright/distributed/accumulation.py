"""Gradient accumulation: when gradients travel, for every kind of parallel model."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from meshwright.planning.plan import Plan

from . import fully_sharded


def context(module: nn.Module, plan: Plan, is_last_microbatch: bool) -> AbstractContextManager[None]:
    """No gradient communication until the last microbatch, unless the plan syncs each; restored also on an exception."""
    sync = plan.data.sync_grad_accum
    if plan.data.technique == "fully_shard":
        return fully_sharded.accumulation(module, sync, is_last_microbatch)
    if isinstance(module, DistributedDataParallel) and sync is False and not is_last_microbatch:
        return module.no_sync()
    return nullcontext()
