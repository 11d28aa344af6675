"""Measure matrix products by shape and layout, and attention by tokens and head dim."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from itertools import cycle, product

import torch
from torch import Tensor
from torch.nn import functional as F

from meshwright.core.dtypes import torch_dtype

from .clock import MIB, Effort, Points, seconds_of

LAYOUTS = ("nt", "nn", "tn")
"""Forward (rows, depth) x (columns, depth)ᵀ, gradient of the input, and gradient of the weight (depth, rows)ᵀ."""
SPREAD = 16 * MIB
"""Bytes over which the operands of successive calls lie: those of a model are in no cache either."""
ROWS = 8
"""Rows times heads of attention."""


def products(device: torch.device, effort: Effort) -> dict[str, tuple[tuple[int, ...], tuple[float, ...]]]:
    """Return "dtype layout" -> dims, and the seconds by rows, columns, depth."""
    found = {}
    for dtype, layout in product(effort.dtypes, LAYOUTS):
        shapes = product(effort.dims, effort.dims, effort.dims)
        found[f"{dtype} {layout}"] = (
            effort.dims,
            tuple(_product_s(shape, layout, torch_dtype(dtype), device, effort) for shape in shapes),
        )
    return found


def _product_s(
    shape: tuple[int, int, int], layout: str, dtype: torch.dtype, device: torch.device, effort: Effort
) -> float:
    rows, columns, depth = shape
    each = (rows * depth + depth * columns) * dtype.itemsize
    number = max(1, min(16, SPREAD // each))
    pairs = [
        (
            _matrix(rows, depth, dtype, device, transposed=layout == "tn"),
            _matrix(depth, columns, dtype, device, transposed=layout == "nt"),
        )
        for _ in range(number)
    ]
    turns = cycle(pairs)
    return seconds_of(lambda: torch.mm(*next(turns)), device, effort)


def _matrix(rows: int, columns: int, dtype: torch.dtype, device: torch.device, *, transposed: bool) -> Tensor:
    """Return small numbers as (rows, columns); a transposed one lies in memory as (columns, rows)."""
    shape = (columns, rows) if transposed else (rows, columns)
    made = torch.full(shape, 0.01, dtype=dtype, device=device)
    return made.t() if transposed else made


def attention(device: torch.device, effort: Effort) -> Iterator[tuple[str, Points]]:
    """Yield "dtype direction head_dim", and (tokens, seconds of one head and row) of causal attention."""
    for dtype, head_dim in product(effort.dtypes, effort.head_dims):
        forward, backward = [], []
        for seq in effort.seqs:
            heads = [
                torch.full((1, ROWS, seq, head_dim), 0.01, dtype=torch_dtype(dtype), device=device, requires_grad=True)
                for _ in range(3)
            ]
            with torch.no_grad():
                forward.append((float(seq), seconds_of(partial(_attend, heads), device, effort) / ROWS))
            output = _attend(heads)
            gradient = torch.full_like(output, 0.01)
            work = partial(torch.autograd.grad, output, heads, gradient, retain_graph=True)
            backward.append((float(seq), seconds_of(work, device, effort) / ROWS))
        yield f"{dtype} forward {head_dim}", forward
        yield f"{dtype} backward {head_dim}", backward


def _attend(heads: list[Tensor]) -> Tensor:
    queries, keys, values = heads
    return F.scaled_dot_product_attention(queries, keys, values, is_causal=True)
