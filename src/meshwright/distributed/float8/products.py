"""Compute the three products of a linear layer: its output, and the gradients of its input and its weight.

torchao's public calls convert whole modules (``convert_to_float8_training``) and make optimizers. The functions here
are called for products outside their module, and for the optimizer step of one parameter. Each should be replaced as
soon as torchao has a public form of it.

Tensor parallelism sends messages between them, and pipelines defer the weight's gradient. Both use the products
defined here instead of calling the layer, so that a float8 layer still multiplies in float8.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from meshwright.distributed.quantize.nf4 import QuantizedLinear, gradient_of_input, linear, output_of
from meshwright.introspection.module_kinds import config_at, is_rounded
from meshwright.planning.tensor.plan import WHOLE, OperandParts

# --- wrap the private functions of torchao


def kernels_of(linear: nn.Module) -> Any:
    """Return the LinearMMConfig of a converted linear layer."""
    return linear.linear_mm_config


def product(x: Tensor, weight: Tensor, kernels: Any, config: Any) -> Tensor:
    """Multiply as a converted layer does: ``x`` (..., in) by ``weight`` (out, in), with torchao's own backward."""
    from torchao.float8.float8_linear import matmul_with_hp_or_float8_args

    return matmul_with_hp_or_float8_args.apply(x, weight.t(), kernels, config)


def scale_for(largest: Tensor, dtype: torch.dtype, power_of_2: bool = False) -> Tensor:
    """Return the scale for values whose largest magnitude is ``largest``."""
    from torchao.float8.float8_utils import amax_to_scale

    return amax_to_scale(largest, dtype, power_of_2)


def rounded_by(operand: Tensor, scale: Tensor, dtype: torch.dtype, kernels: Any, role: str) -> Any:
    """Round an operand with a scale. ``role``: INPUT, WEIGHT or GRAD_OUTPUT."""
    from torchao.float8.float8_training_tensor import GemmInputRole, hp_tensor_and_scale_to_float8

    return hp_tensor_and_scale_to_float8(operand, scale, dtype, kernels, GemmInputRole[role])


def rounded(operand: Tensor, cast: Any, kernels: Any, role: str, dim: int, power_of_2: bool) -> Any:
    """Round an operand with its own scales. ``dim``: dim over which entries share one, if there are several."""
    from torchao.float8.float8_scaling_utils import get_maybe_axiswise_dim, hp_tensor_to_float8_dynamic
    from torchao.float8.float8_training_tensor import GemmInputRole

    return hp_tensor_to_float8_dynamic(
        operand,
        cast.target_dtype,
        kernels,
        gemm_input_role=GemmInputRole[role],
        scaling_granularity=cast.scaling_granularity,
        axiswise_dim=get_maybe_axiswise_dim(dim, cast.scaling_granularity),
        round_scales_to_power_of_2=power_of_2,
    )


def is_disabled(cast: Any) -> bool:
    """Return whether a recipe leaves an operand in high precision."""
    from torchao.float8.config import ScalingType

    return cast.scaling_type is ScalingType.DISABLED


def has_one_scale(cast: Any) -> bool:
    """Return whether an operand has one scale instead of one per row."""
    from torchao.float8.config import ScalingGranularity

    return cast.scaling_granularity is ScalingGranularity.TENSORWISE


def weight_in_float8(codes: Tensor, scale: Tensor, dtype: torch.dtype, kernels: Any) -> Any:
    """Make a float8 weight from codes and their scale; it represents values of ``dtype``."""
    from torchao.float8.float8_training_tensor import Float8TrainingTensor, GemmInputRole

    return Float8TrainingTensor(codes, scale, dtype, kernels, GemmInputRole.WEIGHT)


def codes_of(tensor: Any) -> Tensor:
    """Return the codes of a float8 tensor."""
    return tensor._data


def set_scale(tensor: Any, scale: Tensor) -> None:
    """Set the scale of a float8 tensor whose codes have changed."""
    tensor._scale = scale


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


class Products(Protocol):
    """The products of one linear layer. ``x``: (..., in); ``gradient``: the output's, (..., out)."""

    @property
    def parts(self) -> OperandParts:
        """The operands that are shards of a whole with one scale, so that ranks must first reduce their ``Largest``."""
        ...

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Return the output, differentiable."""
        ...

    def output(self, x: Tensor, weight: Tensor, bias: Tensor | None, largest: Largest = OWN) -> Tensor:
        """Return the output, without recording a graph."""
        ...

    def of_input(self, gradient: Tensor, weight: Tensor, largest: Largest = OWN) -> Tensor:
        """Return the input's gradient, (..., in)."""
        ...

    def of_weight(self, gradient: Tensor, x: Tensor, largest: Largest = OWN) -> Tensor:
        """Return the weight's gradient, in the layout in which the weight is stored."""
        ...

    def matrix(self, weight: Tensor) -> Tensor:
        """Return a view of the weight of shape (out, in), for callers that multiply themselves."""
        ...


@dataclass(frozen=True)
class Plain:
    """Products in the operands' own dtype. ``transposed``: the weight is stored (in, out)."""

    transposed: bool
    parts = WHOLE

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
class In4Bits:
    """Products with a frozen weight that rests in 4 bits; see ``quantize.nf4``."""

    parts = WHOLE

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return linear(x, weight, bias)

    def output(self, x: Tensor, weight: Tensor, bias: Tensor | None, largest: Largest = OWN) -> Tensor:
        return output_of(x, weight, bias)

    def of_input(self, gradient: Tensor, weight: Tensor, largest: Largest = OWN) -> Tensor:
        return gradient_of_input(gradient, weight)

    def of_weight(self, gradient: Tensor, x: Tensor, largest: Largest = OWN) -> Tensor:
        raise NotImplementedError("a weight in 4 bits is frozen, so that nothing asks for its gradient")

    def matrix(self, weight: Tensor) -> Tensor:
        raise NotImplementedError("a weight in 4 bits has no view as a matrix: call output or of_input")


IN_4_BITS = In4Bits()


@dataclass(frozen=True)
class Float8:
    """Products in float8, as torchao's Float8Linear computes them (arXiv 2209.05433).

    Each operand is rounded with the scale of its local values, or of the given ``Largest`` over several ranks.

    Attributes:
        config: torchao's Float8LinearConfig.
        kernels: torchao's LinearMMConfig.
        parts: see ``Products``.
    """

    config: Any
    kernels: Any
    parts: OperandParts = WHOLE

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        made = product(x, weight, self.kernels, self.config)
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

    def matrix(self, weight: Tensor) -> Tensor:
        raise NotImplementedError("a float8 layer has no plain weight matrix: call output, of_input or of_weight")

    def _rounded(self, operand: Tensor, cast: Any, role: str, dim: int, largest: Tensor | None) -> Tensor:
        """Round an operand to float8, unless it is rounded already or the recipe leaves it in high precision.

        Args:
            dim: dim over which entries share a scale, if the operand has several scales.
            largest: see ``Largest``.
        """
        if is_disabled(cast) or is_rounded(operand):
            return operand
        power_of_2 = self.config.round_scales_to_power_of_2
        if largest is not None:
            scale = scale_for(largest, cast.target_dtype, power_of_2)
            return rounded_by(operand, scale, cast.target_dtype, self.kernels, role)
        return rounded(operand, cast, self.kernels, role, dim, power_of_2)


def products_of(module: nn.Module, transposed: bool = False, parts: OperandParts = WHOLE) -> Products:
    """Return the products of a linear layer.

    Args:
        transposed: whether its weight is stored (in, out).
        parts: the operands that are sharded over ranks.
    """
    if (config := config_at(module)) is not None:
        return Float8(config, kernels_of(module), parts if _has_one_scale(config) else WHOLE)
    if isinstance(module, QuantizedLinear):
        return IN_4_BITS
    return TRANSPOSED if transposed else PLAIN


def _has_one_scale(config: Any) -> bool:
    """Return whether an operand has one scale.

    Otherwise each row has its own, a power of two, and a shard of a row differs from the whole only in underflow.
    """
    return has_one_scale(config.cast_config_input)
