"""Replicated data parallelism: torch's DistributedDataParallel (arXiv 2006.15704) on whole parameters."""

# no postponed annotations here: torch reads those of the communication hook as objects

import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel

from meshwright.core.axes import Axis
from meshwright.planning.plan import DataParallel, Plan


def apply(model: nn.Module, plan: Plan, device_mesh: DeviceMesh) -> DistributedDataParallel:
    """Wrap a model whose weights exist. They are not broadcast: equal ones are the init law's business, and audited. Buffers are, before
    each forward, where the user steps by himself: as torch does by default.
    """
    options: dict[str, Any] = {"gradient_as_bucket_view": True, **dict(plan.data.ddp_options)}
    with warnings.catch_warnings():
        # torch 2.13 announces a successor of broadcast_buffers, and says to keep using it where buffers must not be synced
        warnings.simplefilter("ignore", FutureWarning)
        wrapped = DistributedDataParallel(
            model,
            process_group=device_mesh.get_group(Axis.DP_REPLICATE.value),
            init_sync=False,
            broadcast_buffers=plan.data.reduction == "mean",
            **options,
        )
    if plan.data.reduction == "sum":
        wrapped.register_comm_hook(device_mesh.get_group(Axis.DP_REPLICATE.value), _sum)
    return wrapped


def _sum(group: dist.ProcessGroup, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """All-reduce a bucket as a sum (DDP without a hook divides by the group's size)."""
    work = dist.all_reduce(bucket.buffer(), group=group, async_op=True)
    assert work is not None  # an asynchronous call on a group that this rank is in
    return work.get_future().then(lambda future: future.value()[0])


@contextmanager
def accumulation(wrapped: DistributedDataParallel, data: DataParallel, is_last: bool) -> Iterator[None]:
    """Inside, gradients travel only as ``data`` says; afterwards (also after an exception) as by default.

    DDP reduces ``.grad`` as a whole, with what an earlier backward left there. A sum must take what is reduced already once, not
    from every replica, so all but the first give it up here. (The mean of equal values is that value: averaging needs nothing.)
    """
    if data.reduction == "sum" and not getattr(wrapped, UNREDUCED, False) and dist.get_rank(wrapped.process_group) > 0:
        reduced = [parameter.grad for parameter in wrapped.parameters() if parameter.grad is not None]
        if reduced:
            torch._foreach_zero_(reduced)
    # torch records a static graph in the first backward, which must be a synced one
    records = wrapped.static_graph and not wrapped._static_graph_delay_allreduce_enqueued
    travels = is_last or data.sync_grad_accum is True or records
    setattr(wrapped, UNREDUCED, True)
    with nullcontext() if travels else wrapped.no_sync():
        yield
    setattr(wrapped, UNREDUCED, not travels)


UNREDUCED = "_meshwright_unreduced"
"""Set on the wrapper while ``.grad`` holds what this replica alone computed."""
