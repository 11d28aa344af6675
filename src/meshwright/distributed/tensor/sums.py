"""Sum partial gradients over the tensor axis, for whole parameters and for parts that several ranks hold.

The plan tells which gradients to sum. The sum is taken once for each optimizer step, in one message for each dtype.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from meshwright.core.parts import FusedPart, ranges
from meshwright.distributed.exchange.ranks import RankGroup
from meshwright.distributed.torch_private import local_part
from meshwright.distributed.weights.shards import pieces


@dataclass(frozen=True)
class Sums:
    """Parameters that several ranks hold.

    Attributes:
        whole: whole on every rank, with a partial gradient on each.
        copied: cut, but some parts lie on several ranks, with a partial gradient on each.
        alike: whole, with the same gradient on every rank. Their mean is taken: kernels that add up in no fixed order
            would let the ranks drift apart.
    """

    whole: list[nn.Parameter]
    copied: list[nn.Parameter]
    alike: list[nn.Parameter]


@contextmanager
def summing(sums: Sums, group: RankGroup) -> Iterator[None]:
    """Sum over ``group``, on exit, the gradients that backwards inside add.

    Gradients from before are put aside, and added afterwards.
    """
    before = [(parameter, parameter.grad) for parameter in (*sums.whole, *sums.copied, *sums.alike)]
    for parameter, _ in before:
        parameter.grad = None
    yield
    for parameter in sums.alike:
        if parameter.grad is not None:
            _local(parameter.grad).div_(group.size)
    places = [(_local(p.grad), 0, 1) for p in (*sums.whole, *sums.alike) if p.grad is not None]
    for parameter in sums.copied:
        if parameter.grad is not None:
            places += _copies(parameter.grad, group)
    _sum(places, group)
    for parameter, earlier in before:
        if earlier is not None:
            parameter.grad = earlier if parameter.grad is None else earlier.add_(parameter.grad)


def summing_copies(x: Tensor, dim: int, parts: Sequence[FusedPart], group: RankGroup) -> Tensor:
    """Return a rank's part of a parameter cut along ``dim``, and sum the gradients of copied parts in the backward."""
    return _SummingCopies.apply(x, dim, parts, group)


class _SummingCopies(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, parts: Sequence[FusedPart], group: RankGroup) -> Tensor:
        ctx.dim, ctx.parts, ctx.group = dim, parts, group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor):
        (gradient,) = grad_outputs
        group = ctx.group
        gradient = gradient.clone(memory_format=torch.contiguous_format)
        sizes = [high - low for low, high in ranges(ctx.parts, group.rank, group.size)]
        copies = [part.copies(group.size) for part in ctx.parts]
        views = zip(gradient.split(sizes, dim=ctx.dim), copies, strict=True)
        _sum([(view, group.rank // n, group.size // n) for view, n in views if n > 1], group)
        return gradient, None, None, None


def _local(gradient: Tensor) -> Tensor:
    return local_part(gradient)


def _copies(gradient: Tensor | None, group: RankGroup) -> list[tuple[Tensor, int, int]]:
    """Return (view, slot, number of slots) for each copied part; ranks with copies of the same part share a slot."""
    assert gradient is not None
    return [
        (piece.local, group.rank // piece.copies, group.size // piece.copies)
        for piece in pieces(gradient)
        if piece.copies > 1
    ]


def _sum(places: list[tuple[Tensor, int, int]], group: RankGroup) -> None:
    """Add up views over the ranks, in one message for each dtype; a view is added only to views in the same slot."""
    for dtype in dict.fromkeys(view.dtype for view, *_ in places):
        chosen = [entry for entry in places if entry[0].dtype == dtype]
        flat = torch.zeros(
            sum(view.numel() * slots for view, _, slots in chosen), dtype=dtype, device=chosen[0][0].device
        )
        rooms, start = [], 0
        for view, slot, slots in chosen:
            room = flat[start + slot * view.numel() : start + (slot + 1) * view.numel()].view(view.shape)
            room.copy_(view)
            rooms.append(room)
            start += view.numel() * slots
        group.sum(flat)
        for (view, *_), room in zip(chosen, rooms, strict=True):
            view.copy_(room)
