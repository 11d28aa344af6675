"""Overlap products with the messages before or behind them, through symmetric memory.

torch's fused operators do it ("async TP" in torchtitan): ranks read each other's memory over NVLink while they
multiply. What comes out is what the message and the product give one after the other.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from meshwright.core.errors import UnsupportedError
from meshwright.distributed.torch_private import map_memory

TOKENS = 1
"""The dim of (rows, tokens, features) along which ranks gather and scatter."""


@dataclass(frozen=True)
class Operators:
    """torch's fused operators, or others of the same signature.

    Attributes:
        gather_products: (part, matrices, dim, group name, return_A=) -> (whole, its product with each).
        product_scatter: (summand's factors, "sum", dim, group name) -> this rank's part of the sum.
    """

    gather_products: Callable[..., Any]
    product_scatter: Callable[..., Tensor]


def symmetric_memory(group: dist.ProcessGroup) -> Operators:
    """Return those of torch. Collective: the ranks map each other's memory.

    Raises:
        UnsupportedError: they cannot.
    """
    way = "Set techniques.async_tensor_parallel = false: the numbers are the same."
    if not torch.cuda.is_available():
        raise UnsupportedError(f"techniques.async_tensor_parallel needs CUDA, and none is here. {way}")
    try:
        map_memory(group)
    except (ImportError, RuntimeError) as error:
        raise UnsupportedError(
            f"techniques.async_tensor_parallel: the {dist.get_world_size(group)} ranks of layout.tp cannot map each"
            f" other's memory;"
            f" for that they must be joined by NVLink ({type(error).__name__}: {error}). {way}"
        ) from error
    return Operators(torch.ops.symm_mem.fused_all_gather_matmul, torch.ops.symm_mem.fused_matmul_reduce_scatter)


class Overlap:
    """Products of activations (rows, tokens, features) with matrices (features, others), over the ranks of a group."""

    def __init__(self, group: dist.ProcessGroup):
        self._operators, self._name = symmetric_memory(group), group.group_name

    def gather_products(self, part: Tensor, matrices: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
        """Return a rank's part of the tokens → all of them, and their product with each matrix.

        One message for all products.
        """
        whole, products = self._operators.gather_products(part, matrices, TOKENS, self._name, return_A=True)
        return whole.contiguous(), [product.contiguous() for product in products]  # models take views that need it

    def product_scatter(self, whole: Tensor, matrix: Tensor) -> Tensor:
        """Return (rows, tokens, features) @ (features, others), a summand → this rank's part of the sum."""
        return self._operators.product_scatter(whole, matrix, "sum", TOKENS, self._name).contiguous()
