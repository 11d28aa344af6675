"""Reach the tokens of other ranks, in each of the ways that attention has.

The backward goes the other way round: first the gradients of others' keys, which then travel to their owners while
those of a rank's own keys are computed.

Each rank holds its own part and the one that is passing. The next part travels while attention to this one is
computed. The backward lets keys and values go round once more, with the sums of their gradients behind them: a part's
sum travels while the next part's gradients are computed, and these are added when it has come.

A layer with a window reaches little beyond a rank's own tokens, and a document that lies on one rank reaches nothing.

Where there are fewer key heads than ranks, ranks whose queries share a key head are all sent it, and the gradients
that come back are summed.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from meshwright.core.torch_private import by_values
from meshwright.distributed.context.rows import CutRows, Numbers, kept_on
from meshwright.distributed.exchange.ranks import RankGroup
from meshwright.distributed.recompute.kept import attended
from meshwright.introspection.mixing.masks import KeyRanges

from .kernels import Attended, Given, Gradients, Scores, given_of, gradients_of, wide

# --- attend to a rank's own keys while those of other ranks are on their way, and to these when they have arrived

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


# --- attend to keys and values that go round a ring of ranks


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


# --- fetch the keys and values that a rank's queries reach, and no others


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


# --- trade tokens for heads


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
