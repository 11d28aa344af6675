"""Store weights in 4 bits, as NF4, and compute a linear layer with them (QLoRA, arXiv 2305.14314).

A row is cut into blocks of 64 weights. A block is stored as 36 bytes: 32 of codes, two each (the first in the upper
half of the byte), and the float32 scale, the largest magnitude in the block. A code stands for one of 16 quantiles of a
normal distribution, scaled to [-1, 1]. Codes and scales are those of the library bitsandbytes with blocks of 64; there
a weight's codes and its scales are two tensors. In one tensor, rows are sharded by any axis and columns are cut
between blocks as those of a plain weight are, and one message gathers both.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from meshwright.core.errors import IntegrityError, UnsupportedError
from meshwright.core.record import recall
from meshwright.introspection.roles import reader_of
from meshwright.planning.values import NF4_BLOCK, NF4_BLOCK_BYTES

CODES = NF4_BLOCK // 2
"""Bytes of codes in a block."""
LEVELS = (
    -1.0,
    -0.6961928009986877,
    -0.5250730514526367,
    -0.39491748809814453,
    -0.28444138169288635,
    -0.18477343022823334,
    -0.09105003625154495,
    0.0,
    0.07958029955625534,
    0.16093020141124725,
    0.24611230194568634,
    0.33791524171829224,
    0.44070982933044434,
    0.5626170039176941,
    0.7229568362236023,
    1.0,
)
"""The values of the 16 codes (appendix E of the paper)."""
CHUNK = 2**22
"""Number of weights that are rounded at a time: rounding takes some 20 bytes each."""


@torch.no_grad()
def pack(weight: Tensor) -> Tensor:
    """Round a floating-point weight (rows, columns) to its nearest codes: (rows, columns / 64 · 36) uint8."""
    rows, columns = weight.shape
    packed = torch.empty((rows, columns // NF4_BLOCK * NF4_BLOCK_BYTES), dtype=torch.uint8, device=weight.device)
    step, levels = max(1, CHUNK // max(columns, 1)), torch.tensor(LEVELS, device=weight.device)
    for start in range(0, rows, step):
        some = slice(start, start + step)
        blocks = weight[some].float().unflatten(1, (-1, NF4_BLOCK))  # (rows, blocks, NF4_BLOCK)
        scales = blocks.abs().amax(-1, keepdim=True)
        # a weight half-way between two levels gets the lower one
        codes = torch.bucketize(blocks / torch.where(scales == 0, 1, scales), (levels[1:] + levels[:-1]) / 2)
        pairs = codes.to(torch.uint8).unflatten(-1, (CODES, 2))
        stored = [pairs[..., 0] << 4 | pairs[..., 1], scales.contiguous().view(torch.uint8)]
        packed[some] = torch.cat(stored, dim=-1).flatten(1)  # (rows, blocks · NF4_BLOCK_BYTES)
    return packed


def unpack(packed: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the weight (rows, columns) that ``pack`` stored, computed in float32 and cast to ``dtype``."""
    if packed.dtype != torch.uint8:
        raise IntegrityError(
            f"a weight in 4 bits is stored as uint8, and was cast to {str(packed.dtype).removeprefix('torch.')} before"
            f" a forward: keep frozen weights out of casts (torch 2.13's fully_shard casts no bytes; older ones are"
            f" untested)"
        )
    blocks = packed.unflatten(1, (-1, NF4_BLOCK_BYTES))
    scales = blocks[..., CODES:].contiguous().view(torch.float32)  # (rows, blocks, 1)
    levels = torch.tensor(LEVELS, device=packed.device)
    of_byte = torch.stack([levels.repeat_interleave(len(LEVELS)), levels.repeat(len(LEVELS))], dim=1)  # (256, 2)
    values = F.embedding(blocks[..., :CODES].int(), of_byte).flatten(-2)  # (rows, blocks, NF4_BLOCK)
    return torch.mul(values, scales, out=torch.empty_like(values, dtype=dtype)).flatten(1)  # cast as they are written


@dataclass(frozen=True)
class Rounded:
    """What the record of a layer keeps of its plain weight: the layer's path in the model, and the weight's dtype."""

    path: str
    dtype: torch.dtype


class QuantizedLinear(nn.Linear):
    """A linear layer with a frozen weight in 4 bits; ``weight`` holds its bytes.

    Other code that reads ``weight``, to compute with it or to follow its dtype, is refused.

    Attributes:
        local_weight: this rank's bytes as a plain tensor, where a forward around has put them there.
    """

    local_weight: Tensor | None = None

    def forward(self, input: Tensor) -> Tensor:
        own = self.local_weight
        return linear(input, self._parameters["weight"] if own is None else own, self.bias)  # type: ignore[arg-type]

    def __getattr__(self, name: str) -> Any:
        reader = reader_of(sys._getframe(1)) if name == "weight" else ""
        if reader and self.__dict__["_parameters"]["weight"].dtype == torch.uint8:
            known = recall(self, Rounded)
            raise UnsupportedError(
                f"{known.path if known is not None else 'a linear layer'}.weight rests in 4 bits, and {reader}"
                f" reads it: only the layer's own forward can compute with its bytes. Train that layer (leave it out"
                f" of techniques.freeze), or set techniques.quantize_frozen = none. To look at its values:"
                f" state_dict() of the model gives the bytes, under the same name."
            )
        return super().__getattr__(name)


def linear(x: Tensor, packed: Tensor, bias: Tensor | None) -> Tensor:
    """Compute a linear layer, differentiable in ``x`` and ``bias``.

    The weight is unpacked for each product, in the dtype of ``x``. Only its bytes are saved for the backward, so one
    weight at a time is plain.
    """
    made = _Product.apply(x, packed)
    return made if bias is None else made + bias


def output_of(x: Tensor, packed: Tensor, bias: Tensor | None) -> Tensor:
    """Return the output (..., out) of the input (..., in), without recording a graph."""
    if not x.is_floating_point():
        raise IntegrityError(
            f"a layer with a weight in 4 bits is given {str(x.dtype).removeprefix('torch.')}: the model casts what it"
            f" computes to the dtype of that weight. Set techniques.quantize_frozen = none"
        )
    return F.linear(x, unpack(packed, x.dtype), bias)


def gradient_of_input(gradient: Tensor, packed: Tensor) -> Tensor:
    """Return the input's gradient (..., in) of the output's (..., out)."""
    return gradient @ unpack(packed, gradient.dtype)


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, packed: Tensor) -> Tensor:
        ctx.save_for_backward(packed)
        return output_of(x, packed, None)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor):
        (gradient,), (packed,) = grad_outputs, ctx.saved_tensors
        return gradient_of_input(gradient, packed) if ctx.needs_input_grad[0] else None, None
