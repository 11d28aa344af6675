"""Weights that FSDP gathers in float8: one byte for each element, and one scale for the whole weight, as it would have unsharded.

torch asks the shard that it gathers how to (``fsdp_pre_all_gather``, ``fsdp_post_all_gather``). torchao's answer is another class of
tensor at rest, which optimizers, checkpoints and clipping then meet. Here an object answers in the shard's place, and what rests stays
a plain tensor. It is cast to the dtype of the computation first: what is gathered is bit by bit what rounding the gathered weight gives.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
from torch.distributed.tensor import DTensor, Replicate
from torch.optim.optimizer import register_optimizer_step_post_hook

from meshwright.core.errors import IntegrityError
from meshwright.introspection.converted import config_at

STALE = -1
"""No parameter's version."""


def apply(root: nn.Module, parameters: Sequence[FSDPParam]) -> None:
    """Let the converted layers' weights among torch's own ``parameters`` of ``root`` be gathered in float8.

    Every forward of ``root``, which is sharded, begins with their scales: one message over the ranks that shard, one over those that cut.
    """
    weights = [p for p in parameters if config_at(p._module_info.module) is not None and p._module_info.param_name == "weight"]
    shards = [Shard(parameter) for parameter in weights]
    for parameter, shard in zip(weights, shards, strict=True):
        parameter.__class__ = _GatheredInFloat8
        parameter.__dict__["_meshwright_shard"] = shard
        parameter._init_extensions()
    if shards:
        _live.update(shards)
        _watch_optimizers()
        root.register_forward_pre_hook(lambda module, args: _begin(module, shards), prepend=True)


_live: weakref.WeakSet[Shard] = weakref.WeakSet()


@functools.cache
def _watch_optimizers() -> None:
    """A fused or foreach step raises no version of a DTensor."""
    register_optimizer_step_post_hook(_stepped)


def _stepped(optimizer: torch.optim.Optimizer, args: tuple, kwargs: dict[str, Any]) -> None:
    stepped = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    for shard in _live:
        if id(shard.parameter.sharded_param) in stepped:
            shard.version = STALE


def _begin(root: Any, shards: Sequence[Shard]) -> None:
    """Before torch's own hook, behind which its streams do not wait for ours; what it sets up at a first forward is needed here."""
    root._get_fsdp_state()._lazy_init()
    agree(shards)


class _GatheredInFloat8(FSDPParam):
    @property
    def _sharded_local_tensor(self) -> Any:
        """What torch asks how to gather it, and nothing else."""
        return self.__dict__["_meshwright_shard"]


class Shard:
    """This rank's shard of a weight, as torch gathers it.

    Attributes:
        scale: of the whole weight, (), float32; None before the first forward.
        version: of the parameter when that was agreed on; ``STALE`` behind an optimizer's step.
    """

    def __init__(self, parameter: FSDPParam):
        linear: Any = parameter._module_info.module
        self.parameter, self.kernels = parameter, linear.linear_mm_config
        self.dtype: torch.dtype = linear.config.cast_config_weight.target_dtype
        self.scale: Tensor | None = None
        self.version = STALE

    @property
    def is_cut(self) -> bool:
        """Whether the tensor axis cuts the weight too."""
        spec = self.parameter._unsharded_dtensor_spec
        return spec is not None and not all(isinstance(placement, Replicate) for placement in spec.placements)

    def values(self) -> Tensor:
        """(rows, filled up to those of the other ranks; columns) in the dtype of the computation."""
        p = self.parameter
        return p._sharded_param_data.view(p.padded_sharded_param_size).to(p.device, p.param_dtype or p.orig_dtype)

    def take(self, largest: Tensor) -> None:
        """The largest magnitude in the whole weight is known."""
        from torchao.float8.float8_utils import amax_to_scale

        self.scale, self.version = amax_to_scale(largest, self.dtype), self.parameter.sharded_param._version

    def to(self, *args: Any, **kwargs: Any) -> Shard:
        """Offloaded weights come from host memory when they are asked for."""
        return self

    def size(self) -> torch.Size:
        return self.parameter.sharded_size

    def fsdp_pre_all_gather(self, mesh: Any) -> tuple[tuple[Tensor, ...], tuple[Tensor]]:
        from torchao.float8.float8_training_tensor import GemmInputRole, hp_tensor_and_scale_to_float8

        if self.scale is None or self.version != self.parameter.sharded_param._version:
            raise IntegrityError(
                f"{self.parameter._param_fqn} is gathered in float8, and its scale is not that of its values now: they were changed behind"
                " the beginning of the model's forward, or a part of the model was called by itself. Call the whole model."
            )
        rounded = hp_tensor_and_scale_to_float8(self.values(), self.scale, self.dtype, self.kernels, GemmInputRole.WEIGHT)
        return (rounded._data.view(torch.uint8),), (self.scale,)

    def fsdp_post_all_gather(
        self, outputs: tuple[Tensor, ...], metadata: tuple[Tensor], dtype: torch.dtype, *, out: Tensor | None = None
    ) -> tuple[Tensor, tuple[Tensor, ...]] | None:
        from torchao.float8.float8_training_tensor import Float8TrainingTensor, GemmInputRole

        (gathered,), (scale,) = outputs, metadata
        if out is not None:
            made: Any = out._local_tensor if isinstance(out, DTensor) else out
            made._scale = scale
            return None
        data = gathered.view(self.dtype)
        return Float8TrainingTensor(data, scale, dtype, self.kernels, GemmInputRole.WEIGHT), (data,)


@torch.no_grad()
def agree(shards: Sequence[Shard]) -> None:
    """The scales of whole weights, from what all ranks have of them now."""
    found = torch.stack([shard.values().abs().max().float() for shard in shards])
    info: Any = shards[0].parameter.mesh_info
    _largest(found, info.shard_process_group)
    cut = [number for number, shard in enumerate(shards) if shard.is_cut]
    if cut:
        spec: Any = shards[cut[0]].parameter._unsharded_dtensor_spec
        found[cut] = _largest(found[cut], spec.mesh.get_group())
    for shard, largest in zip(shards, found.unbind(), strict=True):
        shard.take(largest)


def _largest(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    dist.all_reduce(x, op=dist.ReduceOp.MAX, group=group)
    return x
