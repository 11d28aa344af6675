"""Sketch tensors as a few numbers; tensors with equal sketches are equal with overwhelming probability.

A sketch is a few random projections (Johnson and Lindenstrauss 1984), which preserve distances:
‖sketch(x) − sketch(y)‖ is about ‖x − y‖. The directions are products of signs: two vectors along the last dim, and a
few for each of them along the others. Sketching thus reads a tensor only twice, by matrix-vector products; the tables
of signs are small, a multiplication by them is exact in every dtype, and a shard's sketch is a partial sum of the
whole tensor's.
"""

from __future__ import annotations

import math
from functools import lru_cache

import torch
from torch import Tensor

ROW_WIDTH = 8
"""Number of projections per row of a batch."""
TENSOR_WIDTH = 16
"""Number of projections per parameter."""
VECTORS = 2
"""Number of directions along the last dim."""


def sketch_rows(tensor: Tensor, places: Tensor | None = None, length: int | None = None) -> Tensor:
    """Sketch each row: (rows, …, features) of any float dtype → (rows, ROW_WIDTH) float64, on the tensor's device.

    Args:
        places, length: for a tensor that is a part of each row, (rows, tokens, …, features): the (tokens,) places of
            its tokens in a whole row, and the number of a whole row's. The sketches of disjoint parts add up to the
            whole's.
    """
    n_rows, features = tensor.shape[0], tensor.shape[-1]
    whole = tensor.shape[1:-1] if length is None else (length, *tensor.shape[2:-1])
    if math.prod(whole) < ROW_WIDTH:  # too few places for directions that differ
        tensor, whole, features = tensor.unsqueeze(-1), (*whole, features), 1
    along = _products(tensor.reshape(-1, features), _signs(VECTORS, features, "last", tensor.dtype, tensor.device))
    along = along.unflatten(1, (n_rows, math.prod(tensor.shape[1:-1]))).double()  # (VECTORS, rows, places)
    weights = _signs(ROW_WIDTH, math.prod(whole), "others", along.dtype, along.device).view(VECTORS, -1, *whole)
    if places is not None:
        weights = weights.index_select(2, places.to(weights.device))
    weights = weights.flatten(2)
    return (along @ weights.mT).transpose(0, 1).reshape(n_rows, ROW_WIDTH) / ROW_WIDTH**0.5


def sketch_part(part: Tensor, offset: tuple[int, ...], shape: tuple[int, ...]) -> Tensor:
    """Sketch the part of a tensor at ``offset``, (TENSOR_WIDTH,) float64; disjoint parts add up to the whole's.

    Args:
        shape: the whole tensor's shape. Parts may be cut along any dims.
    """
    if part.numel() == 0:
        return torch.zeros(TENSOR_WIDTH, dtype=torch.float64, device=part.device)
    if math.prod(shape[:-1]) < TENSOR_WIDTH:  # too few places for directions that differ
        part, offset, shape = part.unsqueeze(-1), (*offset, 0), (*shape, 1)
    last = _signs(VECTORS, shape[-1], "last", part.dtype, part.device).narrow(1, offset[-1], part.shape[-1])
    along = _products(part.reshape(-1, part.shape[-1]), last).double()  # (VECTORS, places)
    weights = _signs(TENSOR_WIDTH, math.prod(shape[:-1]), "others", along.dtype, along.device).view(-1, *shape[:-1])
    for dim, (start, size) in enumerate(zip(offset[:-1], part.shape[:-1], strict=True), 1):
        weights = weights.narrow(dim, start, size)
    weights = weights.reshape(VECTORS, -1, along.shape[-1])
    return (weights @ along.unsqueeze(-1)).flatten() / TENSOR_WIDTH**0.5


def _products(matrix: Tensor, vectors: Tensor) -> Tensor:
    """Multiply a matrix by vectors: (n, features), (VECTORS, features) → (VECTORS, n)."""
    return torch.stack([matrix @ vector for vector in vectors])


@lru_cache(maxsize=256)
def _signs(number: int, n: int, role: str, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Draw a table of ±1, (number, n), that depends on (number, n, role) alone."""
    generator = torch.Generator().manual_seed(4 * n + 2 * (role == "last") + (number == TENSOR_WIDTH))
    return (2 * torch.randint(0, 2, (number, n), generator=generator, device="cpu") - 1).to(device, dtype)
