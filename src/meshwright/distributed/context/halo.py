"""Fetch the keys and values that a rank's queries reach, and no others.

A layer with a window reaches little beyond a rank's own tokens, and a document that lies on one rank reaches nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from meshwright.core.torch_private import by_values
from meshwright.distributed.exchange.ranks import RankGroup
from meshwright.introspection.mixing.reach import KeyRanges

from .blocks import wide
from .rows import CutRows


@dataclass(frozen=True, eq=False)
class Halo:
    """The tokens of other ranks that one rank's queries reach, and its own that others' reach.

    Attributes:
        group: the ranks.
        sent: (tokens,) int64: which own tokens are sent, row · own tokens + number, those for rank 0 first.
        sends, receives: tokens for and from each rank.
        most: tokens that the rank sends that sends most.
        held: (rows, held) int64: number, among own tokens (row by row) and those received behind them, of each token
            that a row's queries may reach, by place; 0 behind the last.
        places: (rows, held) int64, ascending; behind the last, the rows' length.
        tokens: (n,) int64: the numbers of ``held``, taken as one list, behind which there is a token.
    """

    group: RankGroup
    sent: Tensor
    sends: list[int]
    receives: list[int]
    most: int
    held: Tensor
    places: Tensor
    tokens: Tensor

    @classmethod
    @by_values
    def of(cls, group: RankGroup, rows: CutRows, reach: KeyRanges, count: int) -> Halo:
        """Find who needs which tokens, from the reach of all tokens of ``count`` rows; no message is sent."""
        reach = KeyRanges(reach.lower.expand(count, -1), reach.upper.expand(count, -1))
        ranks, me = range(group.size), group.rank
        places = [rows.places_of(rank).expand(count, -1) for rank in ranks]
        needs = [_needed(reach.take(its), rows.length) for its in places]
        flags = [[needs[taker].gather(1, places[giver]) & (taker != giver) for taker in ranks] for giver in ranks]
        tokens = torch.stack([torch.stack([flag.sum() for flag in of_giver]) for of_giver in flags]).tolist()
        found = [flags[giver][me] for giver in ranks]
        row = torch.arange(count, device=places[me].device)[:, None]
        where = [row.expand_as(places[me]).flatten(), *(row.expand_as(flag)[flag] for flag in found)]
        which = [places[me].flatten(), *(its[flag] for its, flag in zip(places, found, strict=True))]
        held, place = _by_row(torch.cat(where), torch.cat(which), count, rows.length)
        is_token = (place < rows.length).flatten().nonzero()[:, 0]
        sent = torch.cat([flag.flatten().nonzero()[:, 0] for flag in flags[me]])
        receives = [of_giver[me] for of_giver in tokens]
        return cls(group, sent, tokens[me], receives, max(map(sum, tokens)), held, place, is_token)


def _needed(reach: KeyRanges, length: int) -> Tensor:
    """Return which tokens some query reaches: (rows, length) bool."""
    edges = reach.lower.new_zeros((len(reach.lower), length + 1))
    ones = (reach.lower < reach.upper).to(edges.dtype)
    edges.scatter_add_(1, reach.lower.clamp(max=length), ones).scatter_add_(1, reach.upper.clamp(max=length), -ones)
    return edges.cumsum(1)[:, :length] > 0


def _by_row(row: Tensor, place: Tensor, count: int, length: int) -> tuple[Tensor, Tensor]:
    """Return the numbers of tokens, and their places, row by row and by place: (rows, most) each."""
    order = (row * length + place).argsort()
    in_row = torch.bincount(row, minlength=count)
    number = torch.arange(int(in_row.max()), device=row.device)
    index = (in_row.cumsum(0) - in_row)[:, None] + number
    is_filler = number >= in_row[:, None]
    order = order[index.masked_fill(is_filler, 0)]
    return order.masked_fill(is_filler, 0), place[order].masked_fill(is_filler, length)


def fetch(x: Tensor, halo: Halo) -> Tensor:
    """Return (rows, heads, own tokens, features) -> (rows, heads, most, features), at ``halo.places``.

    The backward sums what all ranks hand to each token, in at least fp32.
    """
    return _Fetched.apply(x, halo)  # type: ignore[no-any-return]


class _Fetched(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, halo: Halo) -> Tensor:
        ctx.halo, ctx.own = halo, x.shape
        rows, heads, _, features = x.shape
        tokens = x.transpose(1, 2).flatten(2, 3).flatten(0, 1)
        size = heads * features
        sizes = [[count * size for count in counts] for counts in (halo.sends, halo.receives)]
        received = halo.group.trade(tokens[halo.sent].flatten(), *sizes).view(-1, size)
        held = torch.cat((tokens, received))[halo.held.flatten()]
        return held.view(rows, -1, heads, features).transpose(1, 2)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        halo, (gradient,) = ctx.halo, gradients
        rows, heads, own, features = ctx.own
        size = heads * features
        flat = wide(gradient).transpose(1, 2).reshape(-1, size)[halo.tokens]
        held = flat.new_zeros((rows * own + sum(halo.receives), size)).index_copy_(
            0, halo.held.flatten()[halo.tokens], flat
        )
        mine, others = held.split((rows * own, sum(halo.receives)))
        sizes = [[count * size for count in counts] for counts in (halo.receives, halo.sends)]
        returned = halo.group.trade(others.flatten(), *sizes).view(-1, size)
        mine = mine.index_add(0, halo.sent, returned)
        return mine.view(rows, own, heads, features).transpose(1, 2).to(gradient.dtype), None
