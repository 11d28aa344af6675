"""Step many tensors in one call of torch, whose functions for that are private."""

from __future__ import annotations

import torch
from torch import Tensor


def foreach_norm(tensors: list[Tensor]) -> tuple[Tensor, ...]:
    """Compute the 2-norm of each of many tensors at once, until a public function does."""
    return tuple(torch._foreach_norm(tensors, 2))


def foreach_multiply_(tensors: list[Tensor], factor: float | Tensor) -> None:
    """Multiply many tensors in place, until a public function does."""
    torch._foreach_mul_(tensors, factor)


def foreach_add_(tensors: list[Tensor], others: list[Tensor], factor: float) -> None:
    """Add ``factor`` times other tensors in place, each to its own, until a public function does."""
    torch._foreach_add_(tensors, others, alpha=factor)


def foreach_between(tensors: list[Tensor], others: list[Tensor], weight: float) -> list[Tensor]:
    """Return ``(1 - weight)`` times tensors plus ``weight`` times others, until a public function does."""
    return list(torch._foreach_lerp(tensors, others, weight))


def foreach_between_(tensors: list[Tensor], others: list[Tensor], weight: float) -> None:
    """Move tensors in place towards others by ``weight`` of the way, until a public function does."""
    torch._foreach_lerp_(tensors, others, weight)


def foreach_sign_(tensors: list[Tensor]) -> None:
    """Replace the elements of many tensors by their signs, until a public function does."""
    torch._foreach_sign_(tensors)


def foreach_move_mean_of_squares_(means: list[Tensor], tensors: list[Tensor], decay: float) -> None:
    """Move means of squares in place, to ``decay`` of each and the rest of a square, until a public function does."""
    torch._foreach_mul_(means, decay)
    torch._foreach_addcmul_(means, tensors, tensors, 1 - decay)


def foreach_divided(tensors: list[Tensor], squares: list[Tensor], eps: float) -> list[Tensor]:
    """Return tensors divided by the roots of others plus ``eps``, until a public function does."""
    divisors = torch._foreach_sqrt(squares)
    torch._foreach_add_(divisors, eps)
    torch._foreach_reciprocal_(divisors)
    torch._foreach_mul_(divisors, tensors)
    return list(divisors)
