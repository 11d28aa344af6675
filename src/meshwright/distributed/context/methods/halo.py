"""Fetch the keys and values that a rank's queries reach, and no others.

A layer with a window reaches little beyond a rank's own tokens, and a document that lies on one rank reaches nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from meshwright.core.torch_private import by_values
from meshwright.distributed.context.kernels.fused import wide
from meshwright.distributed.context.rows import CutRows, kept_on
from meshwright.distributed.exchange.ranks import RankGroup
from meshwright.introspection.mixing.reach import KeyRanges

from .arriving import Arrival


@dataclass(frozen=True, eq=False)
class Halo:
    """The tokens of other ranks that one rank's queries reach, and its own that others' reach.

    Attributes:
        group: the ranks.
        sent: (tokens,) int64: which own tokens are sent, row · own tokens + number, those for rank 0 first.
        sends, receives: tokens for and from each rank.
        most: tokens that the rank sends that sends most.
        own: a row's tokens of this rank.
        held: (rows · held,) int64: number, among those received, of each token that a row's queries may reach, by
            place; 0 behind the last.
        places: (rows, held) int64, ascending; behind the last, the rows' length.
        tokens: (n,) int64: the numbers of ``held`` behind which there is a token.
    """

    group: RankGroup
    sent: Tensor
    sends: list[int]
    receives: list[int]
    most: int
    own: int
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
        where = [row.expand_as(flag)[flag] for flag in found]
        which = [its[flag] for its, flag in zip(places, found, strict=True)]
        held, place = _by_row(torch.cat(where), torch.cat(which), count, rows.length)
        is_token = (place < rows.length).flatten().nonzero()[:, 0]
        sent = torch.cat([flag.flatten().nonzero()[:, 0] for flag in flags[me]])
        receives = [of_giver[me] for of_giver in tokens]
        most = max(map(sum, tokens))
        return cls(group, sent, tokens[me], receives, most, places[me].shape[1], held.flatten(), place, is_token)

    def begin_fetch(self, x: Tensor) -> Arrival:
        heads, features = x.shape[1], x.shape[3]
        size = heads * features
        tokens = x.transpose(1, 2).flatten(2, 3).flatten(0, 1)
        wait = self._begin_trade(tokens[kept_on(self.sent, x.device)].flatten(), self.sends, self.receives, size)
        shape = (*self.places.shape, heads, features)
        return lambda: wait()[kept_on(self.held, x.device)].view(shape).transpose(1, 2)

    def begin_return(self, gradients: Tensor) -> Arrival:
        rows, heads, _, features = gradients.shape
        size = heads * features
        held, tokens, sent = (kept_on(x, gradients.device) for x in (self.held, self.tokens, self.sent))
        flat = wide(gradients).transpose(1, 2).reshape(-1, size)[tokens]
        others = flat.new_empty((sum(self.receives), size)).index_copy_(0, held[tokens], flat)
        wait = self._begin_trade(others.flatten(), self.receives, self.sends, size)

        def finish() -> Tensor:
            mine = flat.new_zeros((rows * self.own, size)).index_add_(0, sent, wait())
            return mine.view(rows, self.own, heads, features).transpose(1, 2)

        return finish

    def _begin_trade(self, flat: Tensor, sends: list[int], receives: list[int], size: int) -> Arrival:
        """Begin to trade tokens of ``size`` numbers each; returns (tokens, size)."""
        wait = self.group.begin_trade(flat, [n * size for n in sends], [n * size for n in receives])
        return lambda: wait().view(-1, size)


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
