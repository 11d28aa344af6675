"""Measure matrix products by shape and layout, and attention by tokens and head dim."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import cycle, product
from statistics import median
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from meshwright.core.devices import is_accelerator
from meshwright.core.dtypes import torch_dtype

# --- time small pieces of work on a device that others may share

Work = Callable[[], Any]
Points = list[tuple[float, float]]


@dataclass(frozen=True)
class Effort:
    """The sizes to measure, and for how long.

    Attributes:
        dims: dims of products.
        dtypes: names of the dtypes of products and attention.
        seqs: tokens of attention.
        head_dims: dims of a head.
        sizes: bytes of what memory-bound operators read and write.
        elements: elements of a parameter.
        messages: bytes of messages.
        window_s: shortest time over which calls are averaged.
        windows: such times of each point.
    """

    dims: tuple[int, ...]
    dtypes: tuple[str, ...]
    seqs: tuple[int, ...]
    head_dims: tuple[int, ...]
    sizes: tuple[int, ...]
    elements: tuple[int, ...]
    messages: tuple[int, ...]
    window_s: float
    windows: int


KIB, MIB = 2**10, 2**20
FULL = Effort(
    dims=(16, 64, 256, 1024),
    dtypes=("float32", "bfloat16"),
    seqs=(32, 128, 512, 1024),
    head_dims=(16, 32, 64, 128),
    sizes=(KIB, 16 * KIB, 128 * KIB, 512 * KIB, 2 * MIB, 8 * MIB, 32 * MIB),
    elements=(64, 4096, 65_536, 1_048_576),
    messages=(64, 4 * KIB, 32 * KIB, 256 * KIB, MIB, 4 * MIB, 16 * MIB),
    window_s=0.003,
    windows=5,
)
"""The effort on a CPU."""
ACCELERATED = Effort(
    dims=(64, 256, 1024, 4096, 8192),
    dtypes=("float32", "bfloat16"),
    seqs=(128, 512, 2048, 8192),
    head_dims=(64, 128),
    sizes=(4 * KIB, 256 * KIB, 4 * MIB, 32 * MIB, 256 * MIB),
    elements=(1024, 65_536, 1_048_576, 16_777_216),
    messages=(64, 16 * KIB, 256 * KIB, 4 * MIB, 64 * MIB, 256 * MIB),
    window_s=0.005,
    windows=5,
)
SHORTEST = Effort(
    dims=(16, 64),
    dtypes=("float32",),
    seqs=(16, 64),
    head_dims=(16,),
    sizes=(KIB, 64 * KIB),
    elements=(64, 4096),
    messages=(64, 64 * KIB),
    window_s=0.0002,
    windows=2,
)
"""Enough to see that everything is measured; the figures are coarse."""


def seconds_of(work: Work, device: torch.device, effort: Effort) -> float:
    """Return the seconds of a call, averaged over windows of calls, of which the median counts.

    On an accelerator a window ends when the device has done its work: what counts is the slower of host and device.
    """
    work()
    calls = 1
    while (spent := _spent(work, calls, device)) < effort.window_s:
        calls = max(calls + 1, min(10 * calls, int(1.3 * calls * effort.window_s / max(spent, 1e-9))))
    found = [spent, *(_spent(work, calls, device) for _ in range(effort.windows - 1))]
    return max(median(found) / calls, 1e-9)


def _spent(work: Work, calls: int, device: torch.device) -> float:
    # one thread's own time leaves out when the host runs other programs
    now = time.perf_counter if is_accelerator(device) or torch.get_num_threads() > 1 else time.thread_time
    _finish(device)
    began = now()
    for _ in range(calls):
        work()
    _finish(device)
    return now() - began


def _finish(device: torch.device) -> None:
    if is_accelerator(device):
        torch.get_device_module(device).synchronize(device)


# --- measure matrix products by shape and layout, and attention by tokens and head dim

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
