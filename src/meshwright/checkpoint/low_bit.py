"""Save low-bit moments as the float32 values that they stand for, and round them again when read.

So any layout reads the checkpoint. Moments that torchao rounded come back bit for bit where they are cut into the
same blocks again. torchao's own rounding would not do that: a block's largest element gives the scale, but no code
means −1, so a block whose largest element is negative would shrink each time. This module finds the scale by which
every value of the block is a code's. Where blocks lie otherwise, values are rounded once more, and a warning says so.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from meshwright.distributed.float8.torchao_private import quantize
from meshwright.distributed.optimizer.torchao_adamw import SIGNED, TorchaoAdamW, is_rounded
from meshwright.distributed.process import agree
from meshwright.distributed.process.world import is_rank_zero
from meshwright.distributed.torch_private import local_part
from meshwright.distributed.weights.shards import with_local

log = logging.getLogger("meshwright")

LEAST_SCALE = 1e-12
"""The least scale, as in torchao."""
ULPS = 2
"""Bound, in float32 steps, on the error of a scale recovered from its product with a code by division."""


def is_low_bit(optimizer: torch.optim.Optimizer) -> bool:
    return isinstance(optimizer, TorchaoAdamW) and optimizer.state_word != "full"


def as_values(moment: Tensor, parameter: Tensor) -> Tensor:
    """Return a moment as float32 in host memory, placed like the parameter, whether it is low-bit or not.

    With another layout, another rank may have a small moment in low bits.
    """
    local = local_part(moment)
    values = (local.dequantize() if is_rounded(moment) else local).detach().to("cpu", torch.float32)
    return with_local(parameter, values) if isinstance(parameter, DTensor) else values


class Rounding:
    """A loader of values into an optimizer's moments that counts what rounding changed."""

    def __init__(self) -> None:
        self.changed = self.values = 0

    @torch.no_grad()
    def take(self, optimizer: TorchaoAdamW, parameter: nn.Parameter, key: str, values: Tensor) -> Tensor:
        """Convert values to a moment of the parameter, in the form that the optimizer keeps."""
        moment = optimizer.new_moment(parameter, key)
        local, given = (local_part(t) for t in (moment, values))
        given = given.to(local.device)
        if is_rounded(moment):
            back = _round(local, given.float(), signed=SIGNED[key])
        else:
            back = local.copy_(given)
        self.changed += int((back.to(given.dtype) != given).sum())
        self.values += given.numel()
        return moment

    def tell(self, folder: object) -> None:
        """Log on the first rank what rounding changed. Collective."""
        changed, values = (
            sum(counts) for counts in zip(*agree.everybody_says((self.changed, self.values)), strict=True)
        )
        if changed and is_rank_zero():
            log.warning(
                f"{folder}: {changed / values:.3%} of the optimizer's state was rounded once more, since its blocks lie"
                f" otherwise in this layout (or have other bits) than in the one that wrote it"
            )


def _round(moment: Tensor, values: Tensor, *, signed: bool) -> Tensor:
    """Fill a torchao moment in place, and return the values that it then stands for."""
    made: torch.Tensor = moment
    table: Tensor = made.qmap  # type: ignore[attr-defined]
    blocks = values.reshape(-1, made.block_size)  # type: ignore[attr-defined]
    scale = blocks.abs().amax(-1).clip(LEAST_SCALE)
    found = torch.zeros_like(scale, dtype=torch.bool)
    for tried in _scales(blocks, table, signed=signed):
        codes = quantize(blocks / tried.unsqueeze(1), table)
        fits = ((table[codes.int()] * tried.unsqueeze(1)) == blocks).all(1) & ~found
        scale, found = torch.where(fits, tried, scale), found | fits
    codes = quantize(blocks / scale.unsqueeze(1), table)
    packed = codes if len(table) == 256 else (codes.view(-1)[::2] << 4) | codes.view(-1)[1::2]
    made.codes.copy_(packed.view(made.codes.shape))  # type: ignore[attr-defined]
    made.scale.copy_(scale)  # type: ignore[attr-defined]
    return made.dequantize()


def _scales(blocks: Tensor, table: Tensor, *, signed: bool) -> Iterator[Tensor]:
    """Yield candidate scales: the largest magnitude, or (negative, lowest code) that over the code's magnitude."""
    largest = blocks.abs().amax(-1)
    yield largest.clip(LEAST_SCALE)
    if signed:
        middle = largest / table.abs()[0]
        yield middle
        for towards in (torch.inf, 0.0):
            tried = middle
            for _ in range(ULPS):
                tried = torch.nextafter(tried, torch.full_like(tried, towards))
                yield tried
