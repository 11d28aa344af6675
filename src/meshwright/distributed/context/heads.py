"""Trade tokens for heads: each rank gets some heads of all tokens (DeepSpeed Ulysses, arXiv 2309.14509).

Where there are fewer key heads than ranks, ranks whose queries share a key head are all sent it, and the gradients
that come back are summed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from meshwright.core.torch_private import by_values
from meshwright.distributed.exchange.ranks import RankGroup

from .blocks import wide
from .rows import CutRows, place, select


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
        numbers: of each member's tokens, (rows or 1, tokens) int64 each: their numbers among all members', by place.
        places: (rows or 1, tokens) int64, the places of all of them, ascending.
    """

    group: RankGroup
    first: int
    count: int
    rows: CutRows
    numbers: tuple[Tensor, ...]
    places: Tensor

    @classmethod
    @by_values
    def of(cls, group: RankGroup, rows: CutRows, first: int, count: int) -> Members:
        of_members = [rows.places_of(rank) for rank in range(first, first + count)]
        places = torch.cat(of_members, dim=1).sort(dim=1).values
        numbers = tuple(torch.searchsorted(places, own.contiguous()) for own in of_members)
        return cls(group, first, count, rows, numbers, places)

    @property
    def ranks(self) -> range:
        return range(self.first, self.first + self.count)

    def sizes(self, of_member: list[int]) -> list[int]:
        """Return a number for every rank of the group: the members' in order, 0 for others."""
        return [0] * self.first + of_member + [0] * (self.group.size - self.first - self.count)


def to_heads(x: Tensor, shares: tuple[range, ...], members: Members) -> Tensor:
    """Return (rows, heads, own tokens, features) -> (rows, own heads, members' tokens, features), in rows' order.

    Args:
        shares: each member's heads; several may have the same one.
    """
    return _ToHeads.apply(x, shares, members)  # type: ignore[no-any-return]


def to_tokens(x: Tensor, shares: tuple[range, ...], members: Members) -> Tensor:
    """Return what ``to_heads`` was given; no two members have the same head."""
    return _ToTokens.apply(x, shares, members)  # type: ignore[no-any-return]


class _ToHeads(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, shares: tuple[range, ...], members: Members) -> Tensor:
        ctx.shares, ctx.members = shares, members
        return _heads(x, shares, members)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        return _tokens(gradients[0], ctx.shares, ctx.members), None, None


class _ToTokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, shares: tuple[range, ...], members: Members) -> Tensor:
        ctx.shares, ctx.members = shares, members
        return _tokens(x, shares, members)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        return _heads(gradients[0], ctx.shares, ctx.members), None, None


def _heads(x: Tensor, shares: tuple[range, ...], members: Members) -> Tensor:
    rows, _, own, features = x.shape
    heads = len(shares[members.group.rank - members.first])
    flat = torch.cat([x[:, share.start : share.stop].flatten() for share in shares])
    counts = [members.rows.counts[rank] for rank in members.ranks]
    receives = [rows * heads * count * features for count in counts]
    sends = [rows * len(share) * own * features for share in shares]
    received = members.group.trade(flat, members.sizes(sends), members.sizes(receives))
    made = x.new_empty((rows, heads, sum(counts), features))
    for part, count, numbers in zip(received.split(receives), counts, members.numbers, strict=True):
        place(made, numbers, 2, part.view(rows, heads, count, features))
    return made


def _tokens(x: Tensor, shares: tuple[range, ...], members: Members) -> Tensor:
    rows, heads, _, features = x.shape
    counts = [members.rows.counts[rank] for rank in members.ranks]
    own = counts[members.group.rank - members.first]
    sends = [rows * heads * count * features for count in counts]
    flat = x.new_empty(sum(sends))
    for part, count, numbers in zip(flat.split(sends), counts, members.numbers, strict=True):
        select(x, numbers, 2, out=part.view(rows, heads, count, features))
    receives = [rows * len(share) * own * features for share in shares]
    received = members.group.trade(flat, members.sizes(sends), members.sizes(receives))
    shape = (rows, max(share.stop for share in shares), own, features)
    parts = [part.view(rows, -1, own, features) for part in received.split(receives)]
    if sum(map(len, shares)) == shape[1]:
        return torch.cat(parts, dim=1)
    made = x.new_zeros(shape, dtype=wide(x[:0]).dtype)
    for part, share in zip(parts, shares, strict=True):
        made[:, share.start : share.stop] += part
    return made.to(x.dtype)
