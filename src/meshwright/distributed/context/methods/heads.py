"""Trade tokens for heads: each rank gets some heads of all tokens (DeepSpeed Ulysses, arXiv 2309.14509).

Where there are fewer key heads than ranks, ranks whose queries share a key head are all sent it, and the gradients
that come back are summed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from meshwright.core.torch_private import by_values
from meshwright.distributed.context.kernels.fused import wide
from meshwright.distributed.context.rows import CutRows, Numbers
from meshwright.distributed.exchange.ranks import RankGroup


def shares_of_heads(heads: int, key_heads: int, ranks: int) -> tuple[tuple[range, ...], tuple[range, ...]]:
    """Return each rank's heads, and the key heads that they need; ``ranks`` divides ``heads``.

    Every rank's heads are as many for each of its key heads.
    """
    own, shared = heads // ranks, heads // key_heads
    starts = range(0, heads, own)
    return (
        tuple(range(start, start + own) for start in starts),
        tuple(range(start // shared, -(-(start + own) // shared)) for start in starts),
    )


@dataclass(frozen=True, eq=False)
class Members:
    """Ranks that trade tokens for heads.

    Attributes:
        group: the ranks of the context axis.
        first, count: the members are ``count`` ranks from ``first`` on.
        rows: where tokens lie.
        numbers: of each member's tokens, among all members', by place.
        places: (rows or 1, tokens) int64, the places of all of them, ascending.
    """

    group: RankGroup
    first: int
    count: int
    rows: CutRows
    numbers: tuple[Numbers, ...]
    places: Tensor

    @classmethod
    @by_values
    def of(cls, group: RankGroup, rows: CutRows, first: int, count: int) -> Members:
        of_members = [rows.places_of(rank) for rank in range(first, first + count)]
        places = torch.cat(of_members, dim=1).sort(dim=1).values
        numbers = tuple(Numbers.of(torch.searchsorted(places, own.contiguous())) for own in of_members)
        return cls(group, first, count, rows, numbers, places)

    @property
    def ranks(self) -> range:
        return range(self.first, self.first + self.count)

    def sizes(self, of_member: list[int]) -> list[int]:
        """Return a number for every rank of the group: the members' in order, 0 for others."""
        return [0] * self.first + of_member + [0] * (self.group.size - self.first - self.count)


def to_heads(tensors: Sequence[Tensor], shares: Sequence[tuple[range, ...]], members: Members) -> tuple[Tensor, ...]:
    """Return, of tensors (rows, heads, own tokens, features), (rows, own heads, members' tokens, features) each.

    They travel in one message, and are of one dtype; tokens are in rows' order.

    Args:
        shares: for each tensor, each member's heads; several members may have the same one.
    """
    return _ToHeads.apply(tuple(shares), members, *tensors)  # type: ignore[no-any-return]


def to_tokens(x: Tensor, shares: tuple[range, ...], members: Members) -> Tensor:
    """Return one tensor as ``to_heads`` was given it; no two members have the same head."""
    return _ToTokens.apply(x, shares, members)  # type: ignore[no-any-return]


class _ToHeads(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, shares: tuple[tuple[range, ...], ...], members: Members, *tensors: Tensor) -> Any:
        ctx.shares, ctx.members = shares, members
        return tuple(_heads(tensors, shares, members))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return None, None, *_tokens(gradients, ctx.shares, ctx.members)


class _ToTokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, shares: tuple[range, ...], members: Members) -> Tensor:
        ctx.shares, ctx.members = shares, members
        return _tokens((x,), (shares,), members)[0]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        return _heads(gradients, (ctx.shares,), ctx.members)[0], None, None


@dataclass(frozen=True)
class _Layout:
    """The shapes in which tensors lie in a message, (rows, heads, tokens, features), by member and tensor.

    Attributes:
        scattered: each member's heads of this rank's tokens.
        collected: this rank's heads of each member's tokens.
    """

    scattered: list[list[tuple[int, ...]]]
    collected: list[list[tuple[int, ...]]]

    @classmethod
    def of(cls, tensors: Sequence[Tensor], shares: Sequence[tuple[range, ...]], members: Members) -> _Layout:
        rows, me = tensors[0].shape[0], members.group.rank - members.first
        counts = [members.rows.counts[rank] for rank in members.ranks]
        features = [x.shape[3] for x in tensors]
        scattered, collected = (
            [
                [(rows, len(s[a]), counts[b], n) for s, n in zip(shares, features, strict=True)]
                for member in range(members.count)
                for a, b in ((member, me) if scatters else (me, member),)
            ]
            for scatters in (True, False)
        )
        return cls(scattered, collected)


def _sizes(shapes: list[list[tuple[int, ...]]]) -> list[int]:
    return [sum(map(math.prod, of_member)) for of_member in shapes]


def _parts(flat: Tensor, shapes: list[list[tuple[int, ...]]]) -> list[list[Tensor]]:
    """View a message's parts, by member and tensor."""
    pieces = iter(flat.split([math.prod(shape) for of_member in shapes for shape in of_member]))
    return [[next(pieces).view(shape) for shape in of_member] for of_member in shapes]


def _heads(tensors: Sequence[Tensor], shares: Sequence[tuple[range, ...]], members: Members) -> list[Tensor]:
    layout = _Layout.of(tensors, shares, members)
    sends, receives = _sizes(layout.scattered), _sizes(layout.collected)
    flat = tensors[0].new_empty(sum(sends))
    for member, parts in enumerate(_parts(flat, layout.scattered)):
        for part, x, share in zip(parts, tensors, shares, strict=True):
            part.copy_(x[:, share[member].start : share[member].stop])
    received = members.group.trade(flat, members.sizes(sends), members.sizes(receives))
    tokens = sum(shape[0][2] for shape in layout.collected)
    made = [x.new_empty((*shape[:2], tokens, shape[3])) for x, shape in zip(tensors, layout.collected[0], strict=True)]
    for parts, numbers in zip(_parts(received, layout.collected), members.numbers, strict=True):
        for whole, part in zip(made, parts, strict=True):
            numbers.put(whole, part)
    return made


def _tokens(tensors: Sequence[Tensor], shares: Sequence[tuple[range, ...]], members: Members) -> list[Tensor]:
    layout = _Layout.of(tensors, shares, members)
    sends, receives = _sizes(layout.collected), _sizes(layout.scattered)
    flat = tensors[0].new_empty(sum(sends))
    for parts, numbers in zip(_parts(flat, layout.collected), members.numbers, strict=True):
        for x, part in zip(tensors, parts, strict=True):
            numbers.take(x, part)
    received = members.group.trade(flat, members.sizes(sends), members.sizes(receives))
    of_members = _parts(received, layout.scattered)
    return [_joined([parts[i] for parts in of_members], share) for i, share in enumerate(shares)]


def _joined(parts: list[Tensor], shares: tuple[range, ...]) -> Tensor:
    """Put heads together, of which several members may have had the same one: those are summed."""
    heads = max(share.stop for share in shares)
    if sum(map(len, shares)) == heads:
        return torch.cat(parts, dim=1)
    rows, _, tokens, features = parts[0].shape
    made = parts[0].new_zeros((rows, heads, tokens, features), dtype=wide(parts[0][:0]).dtype)
    for part, share in zip(parts, shares, strict=True):
        made[:, share.start : share.stop] += part
    return made.to(parts[0].dtype)
