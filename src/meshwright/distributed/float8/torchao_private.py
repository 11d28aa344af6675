"""Wrap the private functions of torchao; no other file imports them.

torchao's public calls convert whole modules (``convert_to_float8_training``) and make optimizers. The functions here
are called for products outside their module, and for the optimizer step of one parameter. Each should be replaced as
soon as torchao has a public form of it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


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
