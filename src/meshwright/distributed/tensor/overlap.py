"""Overlap matrix products with the messages before or after them, through symmetric memory.

torch's fused operators ("async TP" in torchtitan) read the other ranks' memory over NVLink while they multiply. The
result is the same as of the message and the product one after the other.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from meshwright.core.devices import CUDA, local_device
from meshwright.core.errors import UnsupportedError
from meshwright.distributed.torch_private import map_memory

TOKENS = 1
"""The dim of (rows, tokens, features) along which ranks gather and scatter."""


@dataclass(frozen=True)
class Operators:
    """torch's fused operators, or replacements with the same signature.

    Attributes:
        gather_products: (part, matrices, dim, group name, return_A=) → (whole, its product with each matrix).
        product_scatter: (x, matrix, "sum", dim, group name) → this rank's part of the sum of ``x @ matrix``.
    """

    gather_products: Callable[..., Any]
    product_scatter: Callable[..., Tensor]


def symmetric_memory(group: dist.ProcessGroup) -> Operators:
    """Return torch's operators. Collective: the ranks map each other's memory.

    Raises:
        UnsupportedError: the ranks cannot map each other's memory.
    """
    way = "Set techniques.async_tensor_parallel = false: the numbers are the same."
    if local_device() != CUDA:
        raise UnsupportedError(f"techniques.async_tensor_parallel needs CUDA, which is not available. {way}")
    try:
        map_memory(group)
    except (ImportError, RuntimeError) as error:
        raise UnsupportedError(
            f"techniques.async_tensor_parallel: the {dist.get_world_size(group)} ranks of layout.tp cannot map each"
            f" other's memory; for that they must be joined by NVLink ({type(error).__name__}: {error}). {way}"
        ) from error
    return Operators(torch.ops.symm_mem.fused_all_gather_matmul, torch.ops.symm_mem.fused_matmul_reduce_scatter)


class Overlap:
    """Computes products of activations (rows, tokens, features) with matrices (features, others) over a group."""

    def __init__(self, group: dist.ProcessGroup):
        self._operators, self._name = symmetric_memory(group), group.group_name

    def gather_products(self, part: Tensor, matrices: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
        """Gather the tokens of all ranks, and return them and their product with each matrix.

        All products share one message.
        """
        whole, products = self._operators.gather_products(part, matrices, TOKENS, self._name, return_A=True)
        return whole.contiguous(), [product.contiguous() for product in products]  # models take views

    def product_scatter(self, whole: Tensor, matrix: Tensor) -> Tensor:
        """Return this rank's part of the sum over the ranks of (rows, tokens, features) @ (features, others)."""
        return self._operators.product_scatter(whole, matrix, "sum", TOKENS, self._name).contiguous()
