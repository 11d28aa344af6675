"""Draw a parameter's random values block by block, equal on every layout."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from .shards import seed_of

BLOCK_ELEMENTS = 2**20


def draw_rows(
    local: Tensor,
    offset: tuple[int, ...],
    shape: tuple[int, ...],
    draw: Callable[[Tensor, torch.Generator], object],
    seed: int,
    name: str,
    draw_on: str | None = None,
    dtype: torch.dtype = torch.float32,
) -> None:
    """Draw the shard ``local``, which begins at ``offset`` in a parameter of global ``shape``, by blocks of whole rows.

    A block has at most ``BLOCK_ELEMENTS`` elements (but at least one row). ``draw`` fills it from a generator seeded by
    (seed, name, number of the block).
    """
    if local.numel() == 0:
        return
    row = max(1, int(torch.Size(shape[1:]).numel()))
    rows_per_block = max(1, BLOCK_ELEMENTS // row)
    device = local.device if draw_on in (None, local.device.type) else torch.device(draw_on)
    generator = torch.Generator(device)
    local, offset, shape = (local, offset, shape) if shape else (local.view(1), (0,), (1,))
    first, last = offset[0], offset[0] + local.shape[0]
    rest = tuple(slice(o, o + n) for o, n in zip(offset[1:], local.shape[1:], strict=True))
    for number in range(first // rows_per_block, -(-last // rows_per_block)):
        start = number * rows_per_block
        rows = min(rows_per_block, shape[0] - start)
        generator.manual_seed(seed_of(seed, name, number))
        block = torch.empty((rows, *shape[1:]), dtype=dtype, device=device)
        draw(block, generator)
        low, high = max(first, start), min(last, start + rows)
        local[low - first : high - first].copy_(block[(slice(low - start, high - start), *rest)])
