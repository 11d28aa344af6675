"""Attend to a rank's own keys while those of other ranks are on their way, and to these when they have arrived.

The backward goes the other way round: first the gradients of others' keys, which then travel to their owners while
those of a rank's own keys are computed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from meshwright.core.torch_private import by_values
from meshwright.distributed.context.kernels.blocks import Attended, Scores, given_of, gradients_of
from meshwright.distributed.context.kernels.fused import wide
from meshwright.distributed.context.rows import CutRows, Numbers
from meshwright.distributed.exchange.ranks import RankGroup
from meshwright.distributed.recompute.kept import attended
from meshwright.introspection.mixing.reach import KeyRanges

Arrival = Callable[[], Tensor]
"""Waits for a message, and returns what it brings."""


class Exchange(Protocol):
    """The tokens of other ranks that this rank's queries may reach."""

    @property
    def places(self) -> Tensor:
        """(rows or 1, others) int64, ascending; the rows' length where there is no token."""
        ...

    def begin_fetch(self, x: Tensor) -> Arrival:
        """Begin to fetch (rows, heads, others, features); ``x``: (rows, heads, own tokens, features)."""
        ...

    def begin_return(self, gradients: Tensor) -> Arrival:
        """Begin to bring (rows, heads, others, features) to their owners.

        Returns:
            A function that gives the sum of what all others had for this rank's tokens, (rows, heads, own, features).
        """
        ...


@dataclass(frozen=True, eq=False)
class Gathered:
    """All other ranks' tokens.

    Attributes:
        numbers: for each rank, of its tokens among ``places``; of this rank's own, none that mean anything.
    """

    group: RankGroup
    rows: CutRows
    places: Tensor
    numbers: tuple[Numbers, ...]

    @classmethod
    @by_values
    def of(cls, group: RankGroup, rows: CutRows) -> Gathered:
        of_ranks = [rows.places_of(rank).contiguous() for rank in range(group.size)]
        others = [places for rank, places in enumerate(of_ranks) if rank != group.rank]
        places = torch.cat([of_ranks[0][:, :0], *others], dim=1).sort(dim=1).values
        return cls(group, rows, places, tuple(Numbers.of(torch.searchsorted(places, own)) for own in of_ranks))

    def begin_fetch(self, x: Tensor) -> Arrival:
        rows, heads, own, features = x.shape
        if missing := self.rows.most - own:
            x = torch.cat((x, x.new_zeros((rows, heads, missing, features))), dim=2)
        wait = self.group.begin_gather(x.contiguous())

        def finish() -> Tensor:
            parts = wait()  # (ranks, rows, heads, most, features)
            made = parts.new_empty((rows, heads, self.places.shape[1], features))
            for rank in self._others():
                self.numbers[rank].put(made, parts[rank, :, :, : self.rows.counts[rank]])
            return made

        return finish

    def begin_return(self, gradients: Tensor) -> Arrival:
        rows, heads, _, features = gradients.shape
        gradients = wide(gradients)
        parts = gradients.new_zeros((self.group.size, rows, heads, self.rows.most, features))
        for rank in self._others():
            self.numbers[rank].take(gradients, parts[rank, :, :, : self.rows.counts[rank]])
        wait = self.group.begin_scatter(parts)
        return lambda: wait()[:, :, : self.rows.counts[self.rows.rank]]

    def _others(self) -> list[int]:
        return [rank for rank in range(self.group.size) if rank != self.group.rank]


@dataclass(frozen=True, eq=False)
class Reached:
    """The reach of a rank's queries.

    Attributes:
        own, others: numbers of the rank's own keys, and of those that arrive.
    """

    own: KeyRanges
    others: KeyRanges

    @classmethod
    def of(cls, reach: KeyRanges, own: Tensor, others: Tensor) -> Reached:
        """Count the keys of a reach by places; ``own``, ``others``: the keys' places, (rows or 1, keys)."""
        return cls(reach.among(own), reach.among(others))


def arriving_attention(
    query: Tensor, key: Tensor, value: Tensor, exchange: Exchange, reached: Reached, scores: Scores
) -> tuple[Tensor, Tensor]:
    """Return (rows, heads, own tokens, features) and the logarithms (rows, heads, own tokens)."""
    return _ArrivingAttention.apply(query, key, value, exchange, reached, scores)  # type: ignore[no-any-return]


class _ArrivingAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, exchange: Exchange, reached: Reached, scores: Scores
    ) -> tuple[Tensor, Tensor]:
        features = (key.shape[-1], value.shape[-1])
        wait = exchange.begin_fetch(torch.cat((key, value), dim=-1))
        arrived: list[Tensor] = []

        def compute() -> tuple[Tensor, Tensor]:
            found = Attended()
            found.add(query, key, value, reached.own, scores)
            arrived.append(wait())
            other_key, other_value = arrived[0].split(features, dim=-1)
            found.add(query, other_key, other_value, reached.others, scores)
            return found.finish()

        output, logarithm = attended(compute)
        others = arrived[0] if arrived else wait()  # a recomputation that has the output needs the keys all the same
        ctx.save_for_backward(query, key, value, others, output, logarithm)
        ctx.exchange, ctx.reached, ctx.scores, ctx.features = exchange, reached, scores, features
        return output, logarithm

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, others, *made = ctx.saved_tensors
        given = given_of(ctx.scores, gradients, made)
        other_key, other_value = others.split(ctx.features, dim=-1)
        of_others = gradients_of(given, query, other_key, other_value, ctx.reached.others, ctx.scores)
        wait = ctx.exchange.begin_return(torch.cat((of_others.key, of_others.value), dim=-1))
        own = gradients_of(given, query, key, value, ctx.reached.own, ctx.scores, into=wide(of_others.query))
        for_key, for_value = wait().split(ctx.features, dim=-1)
        for_key, for_value = own.key + for_key, own.value + for_value
        return own.query.to(query.dtype), for_key.to(key.dtype), for_value.to(value.dtype), None, None, None
