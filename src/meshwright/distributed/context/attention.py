"""Attend to the tokens of whole rows, of which each rank has a part."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from meshwright.distributed.tensor.group import TensorGroup

from .rows import FILLER, CutRows, select


def gather_tokens(x: Tensor, rows: CutRows, group: TensorGroup) -> Tensor:
    """Return (rows, heads, own tokens, features) of each rank -> (rows, heads, length, features), in a row's order.

    The backward sums what all ranks hand to each token, in at least fp32.
    """
    return _GatheredTokens.apply(x, rows, group)  # type: ignore[no-any-return]


class _GatheredTokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, rows: CutRows, group: TensorGroup) -> Tensor:
        ctx.rows, ctx.group = rows, group
        missing = rows.most - x.shape[2]
        filled = torch.cat((x, x.new_zeros((*x.shape[:2], missing, x.shape[3]))), dim=2) if missing else x
        parts = group.gather_features(filled.contiguous())  # (ranks, rows, heads, most, features)
        joined = parts.permute(1, 2, 0, 3, 4).flatten(2, 3)
        return select(joined, rows.slots, 2)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        rows, (gradient,) = ctx.rows, gradients
        wide = gradient.to(torch.promote_types(gradient.dtype, torch.float32))
        parts = [select(wide, places.clamp(min=0), 2).transpose(1, 2) for places in rows.places]
        for part, places in zip(parts, rows.places, strict=True):
            part.masked_fill_((places == FILLER)[:, :, None, None], 0)
        mine = ctx.group.scatter(torch.cat(parts, dim=1).contiguous())  # (rows, most, heads, features)
        own = mine[:, : rows.counts[rows.rank]].transpose(1, 2)
        return own.to(gradient.dtype), None, None


def gather_keys(k: Tensor, v: Tensor, rows: CutRows, group: TensorGroup) -> tuple[Tensor, Tensor]:
    """Gather keys and values, (rows, heads, own tokens, features) each, in one message."""
    if k.shape[:3] != v.shape[:3] or k.dtype != v.dtype:
        return gather_tokens(k, rows, group), gather_tokens(v, rows, group)
    both = gather_tokens(torch.cat((k, v), dim=-1), rows, group)
    whole_k, whole_v = both.split((k.shape[-1], v.shape[-1]), dim=-1)
    return whole_k, whole_v
