"""All-gather FSDP's weights in float8: one byte per element, and one scale for the whole weight.

FSDP2 lets a shard define its all-gather (``fsdp_pre_all_gather``, ``fsdp_post_all_gather``). torchao does so with a
tensor subclass at rest, which optimizers, checkpoints and clipping then have to handle. Here a separate object defines
the hooks in place of the shard, and the shard stays a plain tensor. Its values are cast to the compute dtype before
they are rounded, so the gathered weight is bitwise equal to a rounded all-gathered weight.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import Replicate
from torch.optim.optimizer import register_optimizer_step_post_hook

from meshwright.core.errors import IntegrityError
from meshwright.core.names import clean
from meshwright.core.torch_private import version_of
from meshwright.distributed.torch_private import begin_forward, cuts_beside, gather_through, local_part, padded_shard
from meshwright.introspection.module_kinds import config_at

from .products import codes_of, kernels_of, rounded_by, scale_for, set_scale, weight_in_float8

STALE = -1
"""A version that no parameter has."""


def apply(root: nn.Module, parameters: Sequence[Any]) -> None:
    """Gather in float8 the weights of converted layers among FSDP2's ``parameters`` of the sharded module ``root``.

    Every forward of ``root`` begins by computing their scales: one message over the ranks of FSDP's shards, and one
    over the tensor axis.
    """
    sharded = {id(parameter.sharded_param): parameter for parameter in parameters}
    converted: dict[str, Any] = {path: m for path, m in root.named_modules() if config_at(m) is not None}
    shards = [
        Shard(sharded.pop(id(linear.weight)), linear, clean(path))
        for path, linear in converted.items()
        if id(linear.weight) in sharded
    ]
    for shard in shards:
        gather_through(shard.parameter, shard)
    if shards:
        _live.update(shards)
        _watch_optimizers()
        root.register_forward_pre_hook(lambda module, args: _begin(module, shards), prepend=True)


_live: weakref.WeakSet[Shard] = weakref.WeakSet()


@functools.cache
def _watch_optimizers() -> None:
    """Mark scales as stale after optimizer steps: a fused or foreach step does not raise a DTensor's version."""
    register_optimizer_step_post_hook(_stepped)


def _stepped(optimizer: torch.optim.Optimizer, args: tuple, kwargs: dict[str, Any]) -> None:
    stepped = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    for shard in _live:
        if id(shard.parameter.sharded_param) in stepped:
            shard.version = STALE


def _begin(root: Any, shards: Sequence[Shard]) -> None:
    """Compute the scales before FSDP2's own hook, after which its streams would not wait for this one.

    ``begin_forward`` does that hook's set-up for a first forward, which is needed here.
    """
    begin_forward(root)
    agree(shards)


class Shard:
    """This rank's shard of a weight, with FSDP2's all-gather hooks.

    Args:
        parameter: FSDP2's record of the weight.
        linear: the converted layer.
        path: path of the layer.

    Attributes:
        scale: scale of the whole weight, (), float32; None before the first forward.
        version: version of the parameter when the scale was computed; ``STALE`` after an optimizer step.
    """

    def __init__(self, parameter: Any, linear: Any, path: str):
        self.parameter, self.path, self.kernels = parameter, path, kernels_of(linear)
        self.dtype: torch.dtype = linear.config.cast_config_weight.target_dtype
        self.scale: Tensor | None = None
        self.version = STALE

    @property
    def is_cut(self) -> bool:
        """Whether the tensor axis shards the weight too."""
        return any(not isinstance(placement, Replicate) for placement, _ in cuts_beside(self.parameter))

    def values(self) -> Tensor:
        """Return (rows, columns) in the compute dtype; rows are padded to the size of the other ranks' shards."""
        p = self.parameter
        return padded_shard(p).to(p.device, p.param_dtype or p.orig_dtype)

    def take(self, largest: Tensor) -> None:
        """Set the scale from the largest magnitude in the whole weight."""
        self.scale, self.version = scale_for(largest, self.dtype), version_of(self.parameter.sharded_param)

    def to(self, *args: Any, **kwargs: Any) -> Shard:
        """Return self: ``values`` copies offloaded weights to the device."""
        return self

    def size(self) -> torch.Size:
        return self.parameter.sharded_size

    def fsdp_pre_all_gather(self, mesh: Any) -> tuple[tuple[Tensor, ...], tuple[Tensor]]:
        if self.scale is None or self.version != version_of(self.parameter.sharded_param):
            raise IntegrityError(
                f"{self.path}.weight is gathered in float8, and its scale is not that of its values now: they"
                f" were changed after the model's forward began, or a part of the model was called by itself. Call the"
                f" whole model."
            )
        rounded = rounded_by(self.values(), self.scale, self.dtype, self.kernels, "WEIGHT")
        return (codes_of(rounded).view(torch.uint8),), (self.scale,)

    def fsdp_post_all_gather(
        self, outputs: tuple[Tensor, ...], metadata: tuple[Tensor], dtype: torch.dtype, *, out: Tensor | None = None
    ) -> tuple[Tensor, tuple[Tensor, ...]] | None:
        (gathered,), (scale,) = outputs, metadata
        if out is not None:
            set_scale(local_part(out), scale)
            return None
        data = gathered.view(self.dtype)
        return weight_in_float8(data, scale, dtype, self.kernels), (data,)


@torch.no_grad()
def agree(shards: Sequence[Shard]) -> None:
    """Set the scales of whole weights from the present values on all ranks. Collective."""
    found = torch.stack([shard.values().abs().max().float() for shard in shards])
    info: Any = shards[0].parameter.mesh_info
    _largest(found, info.shard_process_group)
    cut = [number for number, shard in enumerate(shards) if shard.is_cut]
    if cut:
        ((_, tensor_group),) = cuts_beside(shards[cut[0]].parameter)
        found[cut] = _largest(found[cut], tensor_group)
    for shard, largest in zip(shards, found.unbind(), strict=True):
        shard.take(largest)


def _largest(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    dist.all_reduce(x, op=dist.ReduceOp.MAX, group=group)
    return x
