"""Step many tensors in one call of torch, whose functions for that are private."""

from __future__ import annotations

import torch
from torch import Tensor

from meshwright.core.private_names import found, found_or_none


def foreach_norm(tensors: list[Tensor]) -> tuple[Tensor, ...]:
    """Compute the 2-norm of each of many tensors, at once where torch can."""
    at_once = found_or_none("torch._foreach_norm")
    return tuple(map(torch.linalg.vector_norm, tensors) if at_once is None else at_once(tensors, 2))


def foreach_multiply_(tensors: list[Tensor], factor: float | Tensor) -> None:
    """Multiply many tensors in place, at once where torch can."""
    if (at_once := found_or_none("torch._foreach_mul_")) is not None:
        at_once(tensors, factor)
        return
    for tensor in tensors:
        tensor.mul_(factor)


def foreach_add_(tensors: list[Tensor], others: list[Tensor], factor: float) -> None:
    """Add ``factor`` times other tensors in place, each to its own."""
    found("torch._foreach_add_")(tensors, others, alpha=factor)


def foreach_between(tensors: list[Tensor], others: list[Tensor], weight: float) -> list[Tensor]:
    """Return ``(1 - weight)`` times tensors plus ``weight`` times others."""
    return list(found("torch._foreach_lerp")(tensors, others, weight))


def foreach_between_(tensors: list[Tensor], others: list[Tensor], weight: float) -> None:
    """Move tensors in place towards others by ``weight`` of the way."""
    found("torch._foreach_lerp_")(tensors, others, weight)


def foreach_sign_(tensors: list[Tensor]) -> None:
    """Replace the elements of many tensors by their signs."""
    found("torch._foreach_sign_")(tensors)


def foreach_move_mean_of_squares_(means: list[Tensor], tensors: list[Tensor], decay: float) -> None:
    """Move means of squares in place, to ``decay`` of each and the rest of a square."""
    found("torch._foreach_mul_")(means, decay)
    found("torch._foreach_addcmul_")(means, tensors, tensors, 1 - decay)


def foreach_divided(tensors: list[Tensor], squares: list[Tensor], eps: float) -> list[Tensor]:
    """Return tensors divided by the roots of others plus ``eps``."""
    divisors = found("torch._foreach_sqrt")(squares)
    found("torch._foreach_add_")(divisors, eps)
    found("torch._foreach_reciprocal_")(divisors)
    found("torch._foreach_mul_")(divisors, tensors)
    return list(divisors)
