"""Run the fused kernels of attention that return the logarithms of their sums."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from meshwright.core import torch_private
from meshwright.planning.context.kernels import (
    CPU_FLASH,
    CUDA_EFFICIENT,
    CUDA_FLASH,
    KERNELS,
    Kernel,
    Need,
    choose_kernel,
)


@dataclass(frozen=True)
class Fused:
    """A fused kernel's two functions, for queries that see all keys, or as many keys as queries in causal order.

    Attributes:
        kernel: what it takes.
        forward: (query, key, value, *, is_causal, scale) -> output and logarithms (rows, heads, queries); tensors are
            (rows, heads, tokens, features).
        backward: (gradient, query, key, value, output, logarithm, *, is_causal, scale) -> gradients of the three;
            output and logarithms are those over all keys, of which these may be some.
    """

    kernel: Kernel
    forward: Callable[..., tuple[Tensor, Tensor]]
    backward: Callable[..., tuple[Tensor, Tensor, Tensor]]

    def given(self, x: Tensor) -> Tensor:
        """Return a tensor in the dtype in which the kernel computes."""
        return wide(x) if self.kernel.widens else x


FUSED = {
    CPU_FLASH.name: Fused(CPU_FLASH, torch_private.flash_attention, torch_private.flash_attention_backward),
    CUDA_FLASH.name: Fused(CUDA_FLASH, torch_private.cuda_flash_attention, torch_private.cuda_flash_attention_backward),
    CUDA_EFFICIENT.name: Fused(
        CUDA_EFFICIENT, torch_private.efficient_attention, torch_private.efficient_attention_backward
    ),
}
"""By the name of the kernel; one that is not here is computed in blocks."""
assert len(FUSED) == len(KERNELS) - 1


def wide(x: Tensor) -> Tensor:
    """Return a tensor in at least fp32."""
    return x if x.dtype == torch.float32 else x.to(torch.promote_types(x.dtype, torch.float32))


def fused_kernel(query: Tensor, value: Tensor, *, has_cap: bool, has_sinks: bool) -> Fused | None:
    """Return the fused kernel that computes an attention; None where it goes in blocks alone."""
    dtype = str(query.dtype).removeprefix("torch.")
    return _fused(Need(query.device.type, dtype, query.shape[-1], value.shape[-1], has_cap, has_sinks))


@functools.cache
def _fused(need: Need) -> Fused | None:
    return FUSED.get(choose_kernel(need)[0].name)
