"""Attend to keys and values that go round a ring of ranks (Liu et al. 2023, arXiv 2310.01889).

Each rank holds its own part and the one that is passing. The next part travels while attention to this one is
computed. The backward lets keys and values go round once more, with the sums of their gradients behind them: a part's
sum travels while the next part's gradients are computed, and these are added when it has come.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from meshwright.distributed.context.kernels.blocks import Attended, Given, Gradients, Scores, given_of, gradients_of
from meshwright.distributed.context.kernels.fused import wide
from meshwright.distributed.exchange.ranks import RankGroup
from meshwright.distributed.recompute.kept import attended
from meshwright.introspection.mixing.reach import KeyRanges


@dataclass(frozen=True, eq=False)
class Ring:
    """Ranks that pass parts of rows on.

    Attributes:
        group: the ranks, of which every ``step``-th is on this ring.
        position: this rank's number on the ring.
        places: of each part's tokens in their rows, (rows or 1, tokens) int64 ascending, by their owner's number.
    """

    group: RankGroup
    position: int
    places: tuple[Tensor, ...]
    step: int = 1

    @property
    def size(self) -> int:
        return len(self.places)

    def part(self, passed: int) -> int:
        """Return whose part is here after it was passed on so many times."""
        return (self.position - passed) % self.size

    def reaches(self, reach: KeyRanges) -> list[KeyRanges]:
        """Count the keys of a reach by places, of each part in the order in which they come."""
        return [reach.among(self.places[self.part(passed)]) for passed in range(self.size)]


def ring_attention(
    query: Tensor, key: Tensor, value: Tensor, ring: Ring, reaches: list[KeyRanges], scores: Scores
) -> tuple[Tensor, Tensor]:
    """Return (rows, heads, own tokens, features) and the logarithms (rows, heads, own tokens).

    Args:
        reaches: of this rank's queries; see ``Ring.reaches``.
    """
    return _RingAttention.apply(query, key, value, ring, reaches, scores)  # type: ignore[no-any-return]


class _RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, ring: Ring, reaches: list[KeyRanges], scores: Scores
    ) -> tuple[Tensor, Tensor]:
        output, logarithm = attended(lambda: _forward(query, key, value, ring, reaches, scores), exchanges=True)
        ctx.save_for_backward(query, key, value, output, logarithm)
        ctx.ring, ctx.reaches, ctx.scores = ring, reaches, scores
        return output, logarithm

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, *made = ctx.saved_tensors
        given = given_of(ctx.scores, gradients, made)
        sums = _backward(given, query, key, value, ctx.ring, ctx.reaches, ctx.scores)
        return sums.query.to(query.dtype), sums.key.to(key.dtype), sums.value.to(value.dtype), None, None, None


class _Parts:
    """Keys and values, or their gradients, in one buffer."""

    def __init__(self, ring: Ring, key: Tensor, value: Tensor):
        self.ring, self.rows = ring, key.shape[0]
        self.sizes = tuple((x.shape[1], x.shape[3]) for x in (key, value))

    def pack(self, key: Tensor, value: Tensor) -> Tensor:
        return torch.cat((key.flatten(), value.flatten()))

    def tokens(self, part: int) -> int:
        return self.ring.places[part].shape[1]

    def elements(self, part: int) -> int:
        return sum(self.rows * heads * self.tokens(part) * features for heads, features in self.sizes)

    def unpack(self, flat: Tensor, part: int) -> tuple[Tensor, Tensor]:
        tokens = self.tokens(part)
        shapes = [(self.rows, heads, tokens, features) for heads, features in self.sizes]
        key, value = flat.split([torch.Size(shape).numel() for shape in shapes])
        return key.view(shapes[0]), value.view(shapes[1])


def _forward(
    query: Tensor, key: Tensor, value: Tensor, ring: Ring, reaches: list[KeyRanges], scores: Scores
) -> tuple[Tensor, Tensor]:
    parts = _Parts(ring, key, value)
    found = Attended()
    flat = parts.pack(key, value)
    for passed in range(ring.size):
        part, following = ring.part(passed), ring.part(passed + 1)
        is_last = passed + 1 == ring.size
        wait = None if is_last else ring.group.pass_on(flat, parts.elements(following), ring.step)
        found.add(query, *parts.unpack(flat, part), reaches[passed], scores)
        flat = flat if wait is None else wait()
    return found.finish()


def _backward(
    given: Given, query: Tensor, key: Tensor, value: Tensor, ring: Ring, reaches: list[KeyRanges], scores: Scores
) -> Gradients:
    """Sum gradients; those of a part begin behind its owner, and come home with the last step."""
    parts = _Parts(ring, key, value)
    flat = parts.pack(key, value)
    own = gradients_here = None
    arriving: Callable[[], Tensor] | None = None
    for passed in range(ring.size):
        part, following = ring.part(passed), ring.part(passed + 1)
        is_last = passed + 1 == ring.size
        wait = None if is_last else ring.group.pass_on(flat, parts.elements(following), ring.step)
        sum_of_queries = None if gradients_here is None else wide(gradients_here.query)
        here = (query, *parts.unpack(flat, part))
        gradients_here = gradients_of(given, *here, reaches[passed], scores, into=sum_of_queries)
        if own is None:
            own = gradients_here
        else:
            travelling = wide(parts.pack(gradients_here.key, gradients_here.value))
            if arriving is not None:
                travelling.add_(arriving())
            arriving = ring.group.pass_on(travelling, parts.elements(following), ring.step)
        flat = flat if wait is None else wait()
    assert own is not None and gradients_here is not None
    if arriving is None:
        return own
    for_key, for_value = parts.unpack(arriving(), ring.position)
    return Gradients(gradients_here.query, own.key + for_key, own.value + for_value)
