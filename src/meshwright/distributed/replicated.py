"""Replicated data parallelism: torch's DistributedDataParallel (arXiv 2006.15704) on whole parameters."""

# no postponed annotations here: torch reads those of the communication hook as objects

import warnings
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel

from meshwright.core.axes import Axis
from meshwright.planning.plan import Plan


def apply(model: nn.Module, plan: Plan, device_mesh: DeviceMesh) -> DistributedDataParallel:
    """Wrap a model whose weights exist. Nothing is broadcast: equal weights are the init law's business, and audited."""
    options: dict[str, Any] = {"gradient_as_bucket_view": True, **dict(plan.data.ddp_options)}
    with warnings.catch_warnings():
        # torch 2.13 announces a successor of broadcast_buffers, and says to keep using it where buffers must not be synced
        warnings.simplefilter("ignore", FutureWarning)
        wrapped = DistributedDataParallel(
            model,
            process_group=device_mesh.get_group(Axis.DP_REPLICATE.value),
            init_sync=False,
            broadcast_buffers=False,
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
