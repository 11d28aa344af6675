"""Compute the three products of a linear layer: its output, and the gradients of its input and its weight.

Tensor parallelism sends messages between them, and pipelines defer the weight's gradient. Both use the products
defined here instead of calling the layer, so that a layer in float8 or in 4 bits still multiplies as it does. torchao's
private names are read here for products outside their module, and for the optimizer step of one parameter.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import Replicate
from torch.optim.optimizer import register_optimizer_step_post_hook

from meshwright.core.errors import IntegrityError
from meshwright.core.names import clean
from meshwright.core.torch_private import version_of
from meshwright.distributed import nf4
from meshwright.distributed.exchange import RankGroup
from meshwright.distributed.torch_private import begin_forward, cuts_beside, gather_through, local_part, padded_shard
from meshwright.introspection.module_kinds import config_at, is_rounded
from meshwright.planning.tensor.plan import WHOLE, OperandParts

# --- read the private names of torchao


def scale_for(largest: Tensor, dtype: torch.dtype, power_of_2: bool = False) -> Tensor:
    """Return the scale for values whose largest magnitude is ``largest``."""
    from torchao.float8.float8_utils import amax_to_scale

    return amax_to_scale(largest, dtype, power_of_2)


def rounded_by(operand: Tensor, scale: Tensor, dtype: torch.dtype, kernels: Any, role: str) -> Any:
    """Round an operand with a scale. ``role``: INPUT, WEIGHT or GRAD_OUTPUT."""
    from torchao.float8.float8_training_tensor import GemmInputRole, hp_tensor_and_scale_to_float8

    return hp_tensor_and_scale_to_float8(operand, scale, dtype, kernels, GemmInputRole[role])


def role_of(operand: Any) -> str:
    """Return the role of a float8 tensor in its product: input, weight or grad_output."""
    return operand._gemm_input_role.name.lower()


def step_of_adam(
    weight: Tensor, gradient: Tensor, step: Tensor, moments: tuple[Tensor, Tensor], rate: Tensor, options: Any
) -> None:
    """Take an AdamW step for one parameter, in place. ``options``: beta1, beta2, weight decay, eps."""
    from torchao.optim.adam import single_param_adam

    beta1, beta2, decay, eps = options
    first, second = moments
    single_param_adam(weight, gradient, step, first, second, None, rate, beta1, beta2, decay, eps, True, False)


def kind_of_state(word: str) -> Any:
    """Return the class of low-bit optimizer states, "8bit" or "4bit"."""
    from torchao.optim.subclass_4bit import OptimState4bit
    from torchao.optim.subclass_8bit import OptimState8bit

    return OptimState8bit if word == "8bit" else OptimState4bit


def quantize(blocks: Tensor, table: Tensor) -> Tensor:
    """Quantize values (blocks, block size) to codes, by a table of 256 or 16 values."""
    from torchao.optim.quant_utils import quantize_4bit_with_qmap, quantize_8bit_with_qmap

    return (quantize_8bit_with_qmap if len(table) == 256 else quantize_4bit_with_qmap)(blocks, table)


# --- compute the three products of a linear layer


class Largest(NamedTuple):
    """The largest magnitude of each operand over several ranks, (), float32; None: that of the local operand."""

    x: Tensor | None = None
    weight: Tensor | None = None
    gradient: Tensor | None = None


OWN = Largest()


class Products:
    """The products of one linear layer. ``x``: (..., in); ``gradient``: the output's, (..., out).

    Attributes:
        parts: the operands that are shards of a whole with one scale, so that ranks must first reduce their
            ``Largest``.
    """

    parts: OperandParts = WHOLE

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Return the output, differentiable."""
        raise NotImplementedError

    def output(self, x: Tensor, weight: Tensor, bias: Tensor | None, largest: Largest = OWN) -> Tensor:
        """Return the output, without recording a graph."""
        raise NotImplementedError

    def of_input(self, gradient: Tensor, weight: Tensor, largest: Largest = OWN) -> Tensor:
        """Return the input's gradient, (..., in)."""
        raise NotImplementedError

    def of_weight(self, gradient: Tensor, x: Tensor, largest: Largest = OWN) -> Tensor:
        """Return the weight's gradient, in the layout in which the weight is stored."""
        raise NotImplementedError(f"{self} is of a frozen weight, so that nothing asks for its gradient")

    def matrix(self, weight: Tensor) -> Tensor:
        """Return a view of the weight of shape (out, in), for callers that multiply themselves."""
        raise NotImplementedError(f"{self} has no plain weight matrix: call output, of_input or of_weight")


@dataclass(frozen=True)
class Plain(Products):
    """Products in the operands' own dtype. ``transposed``: the weight is stored (in, out)."""

    transposed: bool

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return F.linear(x, weight.T if self.transposed else weight, bias)

    def output(self, x: Tensor, weight: Tensor, bias: Tensor | None, largest: Largest = OWN) -> Tensor:
        return F.linear(x, weight.T if self.transposed else weight, bias)

    def of_input(self, gradient: Tensor, weight: Tensor, largest: Largest = OWN) -> Tensor:
        return gradient @ (weight.T if self.transposed else weight)

    def of_weight(self, gradient: Tensor, x: Tensor, largest: Largest = OWN) -> Tensor:
        gradient, x = gradient.flatten(0, -2), x.flatten(0, -2)
        return x.T @ gradient if self.transposed else gradient.T @ x

    def matrix(self, weight: Tensor) -> Tensor:
        return weight.T if self.transposed else weight


PLAIN, TRANSPOSED = Plain(transposed=False), Plain(transposed=True)


@dataclass(frozen=True)
class In4Bits(Products):
    """Products with a frozen weight that rests in 4 bits."""

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return nf4.linear(x, weight, bias)

    def output(self, x: Tensor, weight: Tensor, bias: Tensor | None, largest: Largest = OWN) -> Tensor:
        return nf4.output_of(x, weight, bias)

    def of_input(self, gradient: Tensor, weight: Tensor, largest: Largest = OWN) -> Tensor:
        return nf4.gradient_of_input(gradient, weight)


IN_4_BITS = In4Bits()


@dataclass(frozen=True)
class Float8(Products):
    """Products in float8, as torchao's Float8Linear computes them (arXiv 2209.05433).

    Each operand is rounded with the scale of its local values, or of the given ``Largest`` over several ranks.
    ``config`` and ``kernels`` are torchao's Float8LinearConfig and LinearMMConfig.
    """

    config: Any
    kernels: Any
    parts: OperandParts = WHOLE

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        from torchao.float8.float8_linear import matmul_with_hp_or_float8_args

        made = matmul_with_hp_or_float8_args.apply(x, weight.t(), self.kernels, self.config)
        return made if bias is None else made + bias.to(made.dtype)

    def output(self, x: Tensor, weight: Tensor, bias: Tensor | None, largest: Largest = OWN) -> Tensor:
        c = self.config
        rows = self._rounded(x.flatten(0, -2), c.cast_config_input, "INPUT", -1, largest.x)
        matrix = self._rounded(weight.t(), c.cast_config_weight, "WEIGHT", 0, largest.weight)
        made = torch.mm(rows, matrix).view(*x.shape[:-1], -1)
        return made if bias is None else made + bias.to(made.dtype)

    def of_input(self, gradient: Tensor, weight: Tensor, largest: Largest = OWN) -> Tensor:
        c = self.config
        rows = self._rounded(gradient.flatten(0, -2), c.cast_config_grad_output, "GRAD_OUTPUT", -1, largest.gradient)
        matrix = self._rounded(weight.t(), c.cast_config_weight_for_grad_input, "WEIGHT", -1, largest.weight)
        return torch.mm(rows, matrix.t()).view(*gradient.shape[:-1], -1)

    def of_weight(self, gradient: Tensor, x: Tensor, largest: Largest = OWN) -> Tensor:
        c = self.config
        columns = self._rounded(
            gradient.flatten(0, -2), c.cast_config_grad_output_for_grad_weight, "GRAD_OUTPUT", 0, largest.gradient
        )
        rows = self._rounded(x.flatten(0, -2), c.cast_config_input_for_grad_weight, "INPUT", 0, largest.x)
        return torch.mm(columns.t(), rows)

    def _rounded(self, operand: Tensor, cast: Any, role: str, dim: int, largest: Tensor | None) -> Tensor:
        """Round an operand to float8, unless it is rounded already or the recipe leaves it in high precision.

        Entries along ``dim`` share a scale, if the operand has several scales.
        """
        from torchao.float8.config import ScalingType
        from torchao.float8.float8_scaling_utils import get_maybe_axiswise_dim, hp_tensor_to_float8_dynamic
        from torchao.float8.float8_training_tensor import GemmInputRole

        if cast.scaling_type is ScalingType.DISABLED or is_rounded(operand):
            return operand
        power_of_2 = self.config.round_scales_to_power_of_2
        if largest is not None:
            scale = scale_for(largest, cast.target_dtype, power_of_2)
            return rounded_by(operand, scale, cast.target_dtype, self.kernels, role)
        return hp_tensor_to_float8_dynamic(
            operand,
            cast.target_dtype,
            self.kernels,
            gemm_input_role=GemmInputRole[role],
            scaling_granularity=cast.scaling_granularity,
            axiswise_dim=get_maybe_axiswise_dim(dim, cast.scaling_granularity),
            round_scales_to_power_of_2=power_of_2,
        )


def products_of(module: nn.Module, transposed: bool = False, parts: OperandParts = WHOLE) -> Products:
    """Return the products of a linear layer, whose weight may be stored (in, out), and its operands sharded."""
    if (config := config_at(module)) is not None:
        from torchao.float8.config import ScalingGranularity

        # else each row has a scale of its own, a power of two, and a shard of a row differs only in underflow
        has_one_scale = config.cast_config_input.scaling_granularity is ScalingGranularity.TENSORWISE
        kernels: Any = module.linear_mm_config
        return Float8(config, kernels, parts if has_one_scale else WHOLE)
    if isinstance(module, nf4.QuantizedLinear):
        return IN_4_BITS
    return TRANSPOSED if transposed else PLAIN


# --- agree on the largest magnitudes of sharded operands: each is rounded with the scale of the whole


def agree_for_outputs(
    x: Tensor, weights: Sequence[Tensor], ways: Sequence[Products], group: RankGroup
) -> list[Largest]:
    """Return what layers of one input need for their outputs, with one message; none if no operand is sharded."""
    if all(way.parts == WHOLE for way in ways):
        return [OWN] * len(ways)
    operands: list[Tensor | None] = []
    for weight, way in zip(weights, ways, strict=True):
        operands += [x if way.parts.x else None, weight if way.parts.weight and not is_rounded(weight) else None]
    found = _agreed(operands, group)
    return [Largest(x, weight) for x, weight in zip(found[::2], found[1::2], strict=True)]


def agree_for_gradients(
    gradients: Sequence[Tensor],
    ways: Sequence[Products],
    earlier: Sequence[Largest],
    needed: Sequence[bool],
    group: RankGroup,
) -> list[Largest]:
    """Add to what ``agree_for_outputs`` returned what layers of one input need for their gradients, with one message.

    ``gradients``: of the layers' outputs; ``needed``: for each layer, whether its gradients are.
    """
    if all(way.parts == WHOLE for way in ways):
        return list(earlier)
    operands = [
        g if asked and way.parts.gradient else None for g, way, asked in zip(gradients, ways, needed, strict=True)
    ]
    return [before._replace(gradient=found) for before, found in zip(earlier, _agreed(operands, group), strict=True)]


def _agreed(operands: Sequence[Tensor | None], group: RankGroup) -> list[Tensor | None]:
    """Return the largest magnitude of each operand over the ranks of ``group``."""
    found = [operand.abs().max().float() for operand in operands if operand is not None]
    if not found:
        return [None] * len(operands)
    together = iter(group.largest(torch.stack(found)).unbind())
    return [None if operand is None else next(together) for operand in operands]


def to_save(largest: Sequence[Largest]) -> list[Tensor | None]:
    """Flatten the values of ``agree_for_outputs`` into a list of tensors that a node can save for backward."""
    return [] if largest[0] is OWN else [tensor for one in largest for tensor in (one.x, one.weight)]


def saved(tensors: Sequence[Tensor | None], layers: int) -> list[Largest]:
    """Invert ``to_save`` for so many layers."""
    if not tensors:
        return [OWN] * layers
    return [Largest(x, weight) for x, weight in zip(tensors[::2], tensors[1::2], strict=True)]


def agreed_linear(x: Tensor, weight: Tensor, bias: Tensor | None, way: Products, group: RankGroup) -> Tensor:
    """Compute a linear layer, differentiable: this rank's output features, or its partial sum."""
    if way.parts is WHOLE or way.parts == WHOLE:
        return way.linear(x, weight, bias)
    made = _AgreedLinear.apply(x, weight, way, group)
    return made if bias is None else made + bias.to(made.dtype)


class _AgreedLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, way: Products, group: RankGroup) -> Tensor:
        (largest,) = agree_for_outputs(x, [weight], [way], group)
        ctx.save_for_backward(x, weight, *to_save([largest]))
        ctx.way, ctx.group = way, group
        return way.output(x, weight, None, largest)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor):
        (gradient,) = grad_outputs
        x, weight, *rest = ctx.saved_tensors
        (largest,) = agree_for_gradients([gradient], [ctx.way], saved(rest, 1), [True], ctx.group)
        grad_x = ctx.way.of_input(gradient, weight, largest) if ctx.needs_input_grad[0] else None
        grad_weight = ctx.way.of_weight(gradient, x, largest) if ctx.needs_input_grad[1] else None
        return grad_x, grad_weight, None, None


# --- gather FSDP's weights in float8: one byte per element, and one scale for the whole weight
#
# FSDP2 lets a shard define its all-gather. torchao does so with a tensor subclass at rest, which optimizers,
# checkpoints and clipping then have to handle. Here a separate object defines the hooks in place of the shard, and the
# shard stays a plain tensor. Its values are cast to the compute dtype before they are rounded, so the gathered weight
# is bitwise equal to a rounded all-gathered weight.

STALE = -1
"""A version that no parameter has."""


def gather_in_float8(root: nn.Module, parameters: Sequence[Any]) -> None:
    """Gather in float8 the weights of converted layers among FSDP2's ``parameters`` of the sharded module ``root``.

    Every forward of ``root`` begins by computing their scales: one message over the ranks of FSDP's shards, and one
    over the tensor axis.
    """
    sharded = {id(parameter.sharded_param): parameter for parameter in parameters}
    converted: dict[str, Any] = {path: m for path, m in root.named_modules() if config_at(m) is not None}
    shards = [
        GatheredShard(sharded.pop(id(linear.weight)), linear, clean(path))
        for path, linear in converted.items()
        if id(linear.weight) in sharded
    ]
    for shard in shards:
        gather_through(shard.parameter, shard)

    def begin(module: nn.Module, args: Any) -> None:
        # before FSDP2's own hook, after which its streams would not wait for this one: its set-up is done here
        begin_forward(module)  # type: ignore[arg-type]
        agree(shards)

    if shards:
        _live.update(shards)
        watch_optimizers()
        root.register_forward_pre_hook(begin, prepend=True)


_live: weakref.WeakSet[GatheredShard] = weakref.WeakSet()


@functools.cache
def watch_optimizers() -> None:
    """Mark scales as stale after optimizer steps: a fused or foreach step does not raise a DTensor's version."""

    def stepped(optimizer: torch.optim.Optimizer, args: tuple, kwargs: dict[str, Any]) -> None:
        changed = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        for shard in _live:
            if id(shard.parameter.sharded_param) in changed:
                shard.version = STALE

    register_optimizer_step_post_hook(stepped)


class GatheredShard:
    """This rank's shard of a converted layer's weight, with FSDP2's all-gather hooks; ``parameter``: FSDP2's record.

    Attributes:
        scale: scale of the whole weight, (), float32; None before the first forward.
        version: version of the parameter when the scale was computed; ``STALE`` after an optimizer step.
    """

    def __init__(self, parameter: Any, linear: Any, path: str):
        self.parameter, self.path, self.kernels = parameter, path, linear.linear_mm_config
        self.dtype: torch.dtype = linear.config.cast_config_weight.target_dtype
        self.scale: Tensor | None = None
        self.version = STALE

    def values(self) -> Tensor:
        """Return (rows, columns) in the compute dtype; rows are padded to the size of the other ranks' shards."""
        p = self.parameter
        return padded_shard(p).to(p.device, p.param_dtype or p.orig_dtype)

    def to(self, *args: Any, **kwargs: Any) -> GatheredShard:
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
        return (rounded._data.view(torch.uint8),), (self.scale,)

    def fsdp_post_all_gather(
        self, outputs: tuple[Tensor, ...], metadata: tuple[Tensor], dtype: torch.dtype, *, out: Tensor | None = None
    ) -> tuple[Tensor, tuple[Tensor, ...]] | None:
        from torchao.float8.float8_training_tensor import Float8TrainingTensor, GemmInputRole

        (gathered,), (scale,) = outputs, metadata
        if out is not None:
            local: Any = local_part(out)
            local._scale = scale
            return None
        data = gathered.view(self.dtype)
        return Float8TrainingTensor(data, scale, dtype, self.kernels, GemmInputRole.WEIGHT), (data,)


@torch.no_grad()
def agree(shards: Sequence[GatheredShard]) -> None:
    """Set the scales of whole weights from the present values on all ranks. Collective."""
    found = torch.stack([shard.values().abs().max().float() for shard in shards])
    info: Any = shards[0].parameter.mesh_info
    dist.all_reduce(found, op=dist.ReduceOp.MAX, group=info.shard_process_group)
    beside = [cuts_beside(shard.parameter) for shard in shards]
    # those of which the tensor axis has parts too
    cut = [i for i, cuts in enumerate(beside) if any(not isinstance(placement, Replicate) for placement, _ in cuts)]
    if cut:
        ((_, tensor_group),) = beside[cut[0]]
        of_parts = found[cut]
        dist.all_reduce(of_parts, op=dist.ReduceOp.MAX, group=tensor_group)
        found[cut] = of_parts
    for shard, largest in zip(shards, found.unbind(), strict=True):
        shard.scale, shard.version = scale_for(largest, shard.dtype), version_of(shard.parameter.sharded_param)
