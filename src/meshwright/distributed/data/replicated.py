"""Apply torch's DistributedDataParallel (arXiv 2006.15704) to whole parameters."""

# no postponed annotations here: torch reads those of the communication hook as objects

import dataclasses
import warnings
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel

from meshwright.core.errors import ConfigError, UnsupportedError
from meshwright.core.names import clean
from meshwright.core.record import recall, remember
from meshwright.core.torch_private import foreach_zero_, parameters_in, tree_leaves
from meshwright.distributed.memory.live import LiveStorages
from meshwright.distributed.mesh import replica_axis
from meshwright.distributed.torch_private import has_recorded_graph
from meshwright.introspection.signature import logits_of
from meshwright.planning.plan import Plan
from meshwright.planning.values import DataParallel


class Trained(dict[str, nn.Parameter]):
    """The parameters whose gradients a DDP wrapper reduces, by name."""


@dataclasses.dataclass(frozen=True)
class Unreduced:
    """A mark whether ``.grad`` holds gradients that this replica alone computed."""

    is_so: bool


@dataclasses.dataclass(eq=False)
class GradientBuckets:
    """The storages in which DDP keeps gradients between steps: those that it makes at first, and those it reduces."""

    group: Any
    _seen: dict[int, "weakref.ref[torch.UntypedStorage]"] = dataclasses.field(default_factory=dict)

    def note(self, storage: torch.UntypedStorage) -> None:
        """Add a storage, which may be known already."""
        self._seen[id(storage)] = weakref.ref(storage)

    def storages(self) -> list[torch.UntypedStorage]:
        """List those that have not been freed."""
        return [storage for reference in self._seen.values() if (storage := reference()) is not None]


def apply(model: nn.Module, plan: Plan, device_mesh: DeviceMesh) -> DistributedDataParallel:
    """Wrap a model whose weights exist and are equal on all replicas.

    Weights are not broadcast: the rules of initialisation make them equal, and an audit checks them. Buffers are,
    before each forward, where the user runs the step: torch's default.
    """

    def show_tensors(model: nn.Module, args: Any, output: Any) -> Any:
        """Return the logits of an output object into which DDP does not look; refuse it where the user steps."""
        if dataclasses.is_dataclass(output) or any(isinstance(leaf, torch.Tensor) for leaf in tree_leaves(output)):
            return output
        if plan.data.reduction == "sum":
            return logits_of(output)
        raise UnsupportedError(
            f"{type(model).__name__} returns a {type(output).__name__}, into which DDP does not look, and some of its"
            f" parameters may be left without a gradient. Return a tensor, a tuple, a dict or a dataclass; or use"
            f" parallelize."
        )

    options: dict[str, Any] = {"gradient_as_bucket_view": True, **dict(plan.data.ddp_options)}
    replicas = replica_axis(device_mesh, plan.shares)
    group = None if replicas is None else replicas.get_group()
    if plan.data.idle:  # torch finds unused parameters from the tensors in the output
        options["find_unused_parameters"] = True
        model.register_forward_hook(show_tensors)
    with warnings.catch_warnings(), LiveStorages() as made:
        # torch 2.13 announces a successor of broadcast_buffers, and recommends to keep using broadcast_buffers if
        # buffers must not be synced
        warnings.simplefilter("ignore", FutureWarning)
        wrapped = DistributedDataParallel(
            model, process_group=group, init_sync=False, broadcast_buffers=plan.data.reduction == "mean", **options
        )
    remember(wrapped, Trained(_trained(model)))
    if plan.data.reduction == "sum":
        buckets = GradientBuckets(group)
        for storage in made.storages():
            buckets.note(storage)
        remember(model, buckets)
        wrapped.register_comm_hook(buckets, _sum)
    return wrapped


def refuse_other_trained(module: nn.Module) -> None:
    """Raise ConfigError if requires_grad changed since DDP was built: DDP reduces the gradients known then."""
    known = recall(module, Trained) if isinstance(module, DistributedDataParallel) else None
    if known is not None and {*map(id, known.values())} != {id(p) for p in parameters_in(module) if p.requires_grad}:
        raise ConfigError(
            f"requires_grad of {min(known.keys() ^ _trained(module).keys())} was changed behind parallelize, and DDP"
            f" reduces the gradients that it knew at the start. Lay the model out again (a checkpoint carries it over),"
            f" or set techniques.data_parallel = fully_shard, which follows."
        )


def refuse_unused(wrapped: nn.Module, data: DataParallel) -> None:
    """Raise UnsupportedError if a step's loss left a parameter without a gradient, where DDP waits for all of them.

    DDP reduces buckets that are full, so other parameters' gradients would be those of this rank alone.
    """
    if not isinstance(wrapped, DistributedDataParallel) or data.idle:
        return
    lacking, options = [p for p in parameters_in(wrapped) if p.requires_grad and p.grad is None], dict(data.ddp_options)
    if lacking and not (options.get("find_unused_parameters") or options.get("static_graph")):
        unused = [name for name, parameter in _trained(wrapped).items() if parameter.grad is None]
        raise UnsupportedError(
            f"the loss does not use {', '.join(unused[:3])} ({len(unused)} of the trained parameters), for whose"
            f" gradients DDP waits with those of others. Set techniques.data_parallel = fully_shard, which does not"
            f" wait, or freeze them (techniques.freeze)."
        )


def _trained(model: nn.Module) -> dict[str, nn.Parameter]:
    return {clean(name): parameter for name, parameter in model.named_parameters() if parameter.requires_grad}


def _sum(buckets: GradientBuckets, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """All-reduce a bucket as a sum (DDP without a hook divides by the group's size)."""
    summed = bucket.buffer()
    buckets.note(summed.untyped_storage())
    work = dist.all_reduce(summed, group=buckets.group, async_op=True)
    assert work is not None  # an asynchronous call on a group that this rank is in
    return work.get_future().then(lambda _: summed)


@contextmanager
def accumulation(wrapped: DistributedDataParallel, data: DataParallel, is_last: bool) -> Iterator[None]:
    """Communicate gradients only as ``data`` requests; restore the default afterwards, also after an exception.

    DDP reduces ``.grad`` as a whole, with the values that an earlier backward left in it. A sum must count reduced
    values once, not once per replica, so all replicas but the first zero them before. (Means need nothing: equal
    values are their own mean.)
    """
    if (
        data.reduction == "sum"
        and recall(wrapped, Unreduced) != Unreduced(True)
        and dist.get_rank(wrapped.process_group) > 0
    ):
        reduced = [parameter.grad for parameter in parameters_in(wrapped) if parameter.grad is not None]
        if reduced:
            foreach_zero_(reduced)
    # torch records a static graph in the first backward, which must be a synced one
    records = wrapped.static_graph and not has_recorded_graph(wrapped)
    travels = is_last or data.sync_grad_accum is True or records
    remember(wrapped, Unreduced(True))
    with nullcontext() if travels else wrapped.no_sync():
        yield
    remember(wrapped, Unreduced(not travels))
