"""Sketches: a few numbers that stand for a tensor. Two tensors with equal sketches are equal, but for chances that do not matter.

A sketch is a few random projections (Johnson and Lindenstrauss 1984), so distances are kept: ‖sketch(x) − sketch(y)‖ is about ‖x − y‖. The
directions are products of signs, one table for the last dim and one for the others. So the tables are small, a multiplication by them
is exact in every dtype, and a shard's sketch is a summand of the whole tensor's.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

ROW_WIDTH = 8
"""Numbers per row of a batch."""
TENSOR_WIDTH = 16
"""Numbers per parameter."""


def sketch_rows(tensor: Tensor) -> Tensor:
    """(rows, …, features) of any float dtype → (rows, ROW_WIDTH) float64, on the tensor's device; each row for itself."""
    places = tensor.flatten(1, -2) if tensor.dim() > 2 else tensor.unsqueeze(1)
    features = places @ signs(tensor.shape[-1], ROW_WIDTH, "last", tensor)  # (rows, places, ROW_WIDTH)
    weights = signs(places.shape[1], ROW_WIDTH, "others", features)
    return (features * weights).sum(1, dtype=torch.float64) / ROW_WIDTH**0.5


def sketch_part(part: Tensor, offset: tuple[int, ...], shape: tuple[int, ...]) -> Tensor:
    """The part of a tensor at ``offset`` → (TENSOR_WIDTH,) float64; the sketches of disjoint parts add up to that of the whole.

    Args:
        shape: of the whole tensor. Parts may be cut along any dims.
    """
    if part.numel() == 0:
        return torch.zeros(TENSOR_WIDTH, dtype=torch.float64, device=part.device)
    matrix = part.reshape(-1, part.shape[-1]) if part.dim() else part.reshape(1, 1)
    last = signs(shape[-1] if shape else 1, TENSOR_WIDTH, "last", part)
    first = offset[-1] if offset else 0
    features = matrix @ last[first : first + matrix.shape[1]]  # (places, TENSOR_WIDTH)
    weights = signs(int(torch.Size(shape[:-1]).numel()), TENSOR_WIDTH, "others", part)
    weights = weights.view(*shape[:-1], TENSOR_WIDTH)
    for dim, (start, size) in enumerate(zip(offset[:-1], part.shape[:-1], strict=True)):
        weights = weights.narrow(dim, start, size)
    return (features * weights.reshape(-1, TENSOR_WIDTH)).sum(0, dtype=torch.float64) / TENSOR_WIDTH**0.5


def signs(n: int, width: int, role: str, like: Tensor) -> Tensor:
    """(n, width) of ±1, in the dtype and on the device of ``like``; a function of (n, width, role)."""
    return _signs(n, width, role, like.dtype, like.device)


@lru_cache(maxsize=256)
def _signs(n: int, width: int, role: str, dtype: torch.dtype, device: torch.device) -> Tensor:
    generator = torch.Generator().manual_seed(2 * n + (role == "last"))
    return (2 * torch.randint(0, 2, (n, width), generator=generator, device="cpu") - 1).to(device, dtype)
