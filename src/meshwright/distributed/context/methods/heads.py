"""Trade tokens for heads: each rank gets some heads of all tokens (DeepSpeed Ulysses, arXiv 2309.14509).

Where there are fewer key heads than ranks, ranks whose queries share a key head are all sent it, and the gradients
that come back are summed.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from meshwright.core.torch_private import by_values
from meshwright.distributed.context.kernels.fused import wide
from meshwright.distributed.context.rows import CutRows, Numbers
from meshwright.distributed.exchange.ranks import RankGroup


@functools.cache
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
        messages: shapes of the messages that were sent, by those of their tensors.
    """

    group: RankGroup
    first: int
    count: int
    rows: CutRows
    numbers: tuple[Numbers, ...]
    places: Tensor
    messages: dict[Any, tuple[_Message, _Message]] = field(default_factory=dict)

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
class _Message:
    """The shapes in which tensors lie in a message, (rows, heads, tokens, features), by member and tensor.

    Attributes:
        sizes: elements for every rank of the group.
        elements: of each part.
    """

    shapes: list[list[tuple[int, ...]]]
    sizes: list[int]
    elements: list[int]

    def parts(self, flat: Tensor) -> list[list[Tensor]]:
        """View a message's parts, by member and tensor."""
        pieces = iter(flat.split(self.elements))
        return [[next(pieces).view(shape) for shape in of_member] for of_member in self.shapes]


def _messages(
    tensors: Sequence[Tensor], shares: tuple[tuple[range, ...], ...], members: Members
) -> tuple[_Message, _Message]:
    """Return the message of each member's heads of this rank's tokens, and that of this rank's heads of each's tokens.

    The layers of a microbatch share them.
    """
    rows, features = tensors[0].shape[0], tuple([x.shape[3] for x in tensors])
    if (key := (rows, features, shares)) not in members.messages:
        me = members.group.rank - members.first
        counts = [members.rows.counts[rank] for rank in members.ranks]

        def message(pairs: list[tuple[int, int]]) -> _Message:
            shapes = [
                [(rows, len(share[heads]), counts[tokens], n) for share, n in zip(shares, features, strict=True)]
                for heads, tokens in pairs
            ]
            sizes = members.sizes([sum(map(math.prod, of_member)) for of_member in shapes])
            return _Message(shapes, sizes, [math.prod(shape) for of_member in shapes for shape in of_member])

        everyone = range(members.count)
        members.messages[key] = (
            message([(member, me) for member in everyone]),
            message([(me, member) for member in everyone]),
        )
    return members.messages[key]


def _heads(tensors: Sequence[Tensor], shares: tuple[tuple[range, ...], ...], members: Members) -> list[Tensor]:
    scattered, collected = _messages(tensors, shares, members)
    flat = tensors[0].new_empty(sum(scattered.elements))
    for member, parts in enumerate(scattered.parts(flat)):
        for part, x, share in zip(parts, tensors, shares, strict=True):
            part.copy_(x[:, share[member].start : share[member].stop])
    received = members.group.trade(flat, scattered.sizes, collected.sizes)
    tokens = members.places.shape[1]
    made = [x.new_empty((*shape[:2], tokens, shape[3])) for x, shape in zip(tensors, collected.shapes[0], strict=True)]
    for parts, numbers in zip(collected.parts(received), members.numbers, strict=True):
        for whole, part in zip(made, parts, strict=True):
            numbers.put(whole, part)
    return made


def _tokens(tensors: Sequence[Tensor], shares: tuple[tuple[range, ...], ...], members: Members) -> list[Tensor]:
    scattered, collected = _messages(tensors, shares, members)
    flat = tensors[0].new_empty(sum(collected.elements))
    for parts, numbers in zip(collected.parts(flat), members.numbers, strict=True):
        for x, part in zip(tensors, parts, strict=True):
            numbers.take(x, part)
    received = members.group.trade(flat, collected.sizes, scattered.sizes)
    of_members = scattered.parts(received)
    return [_joined([parts[i] for parts in of_members], share) for i, share in enumerate(shares)]


def _joined(parts: list[Tensor], shares: tuple[range, ...]) -> Tensor:
    """Put heads together, of which several members may have had the same one: those are summed."""
    heads = max([share.stop for share in shares])
    if sum(map(len, shares)) == heads:
        return torch.cat(parts, dim=1)
    rows, _, tokens, features = parts[0].shape
    made = parts[0].new_zeros((rows, heads, tokens, features), dtype=wide(parts[0][:0]).dtype)
    for part, share in zip(parts, shares, strict=True):
        made[:, share.start : share.stop] += part
    return made.to(parts[0].dtype)
