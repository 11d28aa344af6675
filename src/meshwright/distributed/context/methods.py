"""Attend to the tokens of whole rows, of which each rank has a part, in each of the ways that attention has.

all_gather and halo fetch keys: the backward goes the other way round, first the gradients of others' keys, which then
travel to their owners while those of a rank's own keys are computed. A halo is what queries reach, and no more.

On a ring each rank holds its own part and the one that is passing, while the next part travels. The backward lets keys
and values go round once more, with the sums of their gradients behind them.

Tokens are traded for heads among ranks that share out the heads. Where there are fewer key heads than ranks, ranks
whose queries share a key head are all sent it, and the gradients that come back are summed.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from meshwright.core.torch_private import by_values
from meshwright.distributed.context.rows import CutRows, Numbers, kept_on, on_device, select
from meshwright.distributed.exchange import RankGroup, linear_map
from meshwright.introspection.mixing.arithmetic import scale_of
from meshwright.introspection.mixing.interception import AttentionCall
from meshwright.introspection.mixing.masks import KeyRanges, RowMask
from meshwright.introspection.mixing.values import Arithmetic
from meshwright.planning.context.plan import Method, is_divisible

from .kernels import (
    Arrival,
    Attended,
    Given,
    Gradients,
    Keys,
    KeysAtHand,
    Operands,
    Scores,
    attention,
    gradients_of,
    wide,
)

# --- compute one call

Made = TypeVar("Made")


@dataclass(frozen=True, eq=False)
class Context:
    """Where the tokens of a microbatch lie, and how far each attends by one mask: ``reach``, of all tokens of rows."""

    group: RankGroup
    rows: CutRows
    reach: KeyRanges

    @property
    def own_reach(self) -> KeyRanges:
        """The reach of this rank's queries, by places."""
        return self.once("own reach", lambda: self.reach.take(self.rows.own))

    def once(self, what: Any, make: Callable[[], Made]) -> Made:
        """Return what follows from the reach and from where the tokens lie, which the microbatch's layers share."""
        memo, key = self.rows.memo, (self.reach, what)
        if key not in memo:
            memo[key] = make()
        return memo[key]


def attend(call: AttentionCall, context: Context, arithmetic: Arithmetic, method: Method) -> Tensor:
    """Compute a call whose keys lie on all ranks: (rows, heads, own queries, features)."""
    group, rows, once = context.group, context.rows, context.once
    query, key, value = call.query, call.key, call.value
    scores = Scores(scale_of(call), call.extras[arithmetic.cap] if arithmetic.cap else None, bool(arithmetic.sinks))
    halo = partial(once, "halo", lambda: Halo.of(group, rows, context.reach, len(query)))
    # a small copy has fewer heads than its model
    neighbours = method.neighbours if is_divisible(query.shape[1], key.shape[1], method.neighbours) else 1

    is_halo = method.kind == "halo"
    if not is_halo and not method.asked and rows.has_documents:
        # rows of several documents may move fewer bytes by a halo, on the rank that sends most
        size = key.element_size() + wide(key[:0]).element_size()
        each = key.shape[1] * (key.shape[3] + value.shape[3]) * size
        is_halo = halo().most * each < len(query) * max(rows.counts) * method.bytes
    if is_halo or method.kind == "all_gather":
        exchange = halo() if is_halo else once("gathered", lambda: Gathered.of(group, rows))
        arriving = once(exchange, lambda: Arriving.of(exchange, context.own_reach, rows.own))
        return _finished(call, arithmetic, *attention(query, key, value, arriving, scores), range(query.shape[1]))
    if neighbours == 1:
        ring = once("ring", lambda: Ring.of(group, rows.rank, rows.of_ranks, context.own_reach))
        return _finished(call, arithmetic, *attention(query, key, value, ring, scores), range(query.shape[1]))

    # trade tokens for heads among neighbours, let keys and values go round the rest, and trade back
    everyone = [members_of(group, rows, first, neighbours) for first in range(0, group.size, neighbours)]
    position = group.rank // neighbours
    members = everyone[position]
    heads, key_heads = shares_of_heads(query.shape[1], key.shape[1], neighbours)
    query, key, value = trade((query, key, value), (heads, key_heads, key_heads), members, to_heads=True)
    reach = once(members, lambda: context.reach.take(members.places))
    source: Keys = KeysAtHand(reach)
    if len(everyone) > 1:
        places = tuple(each.places for each in everyone)
        source = once(("ring", neighbours), lambda: Ring.of(group, position, places, reach, neighbours))
    output, logarithm = attention(query, key, value, source, scores)
    output = _finished(call, arithmetic, output, logarithm, heads[group.rank - members.first])
    return trade((output,), (heads,), members, to_heads=False)[0]


def _finished(call: AttentionCall, arithmetic: Arithmetic, output: Tensor, logarithm: Tensor, heads: range) -> Tensor:
    """Give sinks their share, one more score for each of these heads, and return the dtype of queries."""
    if arithmetic.sinks:
        sink = call.extras[arithmetic.sinks][heads.start : heads.stop].to(logarithm.dtype)
        output = output * torch.sigmoid(logarithm - sink[None, :, None])[..., None]
    return output.to(call.query.dtype)


def attend_to_whole_rows(call: AttentionCall, mask: RowMask, rows: CutRows, group: RankGroup) -> Tensor:
    """Compute a call as the model does, with keys and values of whole rows, and a mask of all queries and keys."""
    k, v = call.key, call.value
    if k.shape[:3] == v.shape[:3] and k.dtype == v.dtype:  # in one message
        both = gather_tokens(torch.cat((k, v), dim=-1), rows, group)
        key, value = both.split((k.shape[-1], v.shape[-1]), dim=-1)
    else:
        key, value = gather_tokens(k, rows, group), gather_tokens(v, rows, group)
    device = call.query.device
    dense = on_device(mask, rows, device).dense(kept_on(rows.own, device), rows.length, len(call.query))
    return call.compute(call.query, key, value, dense, False)


def gather_tokens(x: Tensor, rows: CutRows, group: RankGroup) -> Tensor:
    """Return (rows, heads, own tokens, features) of each rank -> (rows, heads, length, features), in a row's order.

    The backward sums what all ranks hand to each token, in at least fp32.
    """

    def gather(x: Tensor) -> Tensor:
        parts = group.gather_features(_filled(x, rows))  # (ranks, rows, heads, most, features)
        return select(parts.permute(1, 2, 0, 3, 4).flatten(2, 3), rows.slots, 2)

    def scatter(gradient: Tensor) -> Tensor:
        whole = wide(gradient)
        parts = whole.new_zeros((len(whole), group.size, rows.most, whole.shape[1], whole.shape[3]))
        for rank, count in enumerate(rows.counts):
            parts[:, rank, :count] = select(whole, rows.of_ranks[rank], 2).transpose(1, 2)
        mine = group.scatter(parts.flatten(1, 2))  # (rows, most, heads, features)
        return mine[:, : rows.counts[rows.rank]].transpose(1, 2).to(gradient.dtype)

    return linear_map(x, gather, scatter)


def _filled(x: Tensor, rows: CutRows) -> Tensor:
    """Fill tokens up to those of the rank that has most."""
    missing = rows.most - x.shape[2]
    filled = torch.cat((x, x.new_zeros((*x.shape[:2], missing, x.shape[3]))), dim=2) if missing else x
    return filled.contiguous()


# --- attend to a rank's own keys while those of other ranks are on their way, and to these when they have arrived


@dataclass(frozen=True, eq=False)
class Gathered:
    """All other ranks' tokens.

    Attributes:
        places: (rows or 1, others) int64, ascending; the rows' length where there is no token.
        numbers: for each rank, of its tokens among ``places``; of this rank's own, none that mean anything.
    """

    group: RankGroup
    rows: CutRows
    places: Tensor
    numbers: tuple[Numbers, ...]

    @classmethod
    @by_values
    def of(cls, group: RankGroup, rows: CutRows) -> Gathered:
        of_ranks = [rows.of_ranks[rank].contiguous() for rank in range(group.size)]
        others = [places for rank, places in enumerate(of_ranks) if rank != group.rank]
        places = torch.cat([of_ranks[0][:, :0], *others], dim=1).sort(dim=1).values
        return cls(group, rows, places, tuple(Numbers.of(torch.searchsorted(places, own)) for own in of_ranks))

    def begin_fetch(self, x: Tensor) -> Arrival:
        """Begin to fetch (rows, heads, others, features); ``x``: (rows, heads, own tokens, features)."""
        rows, heads, _, features = x.shape
        wait = self.group.begin_gather(_filled(x, self.rows))

        def finish() -> Tensor:
            parts = wait()  # (ranks, rows, heads, most, features)
            made = parts.new_empty((rows, heads, self.places.shape[1], features))
            for rank, count in enumerate(self.rows.counts):
                if rank != self.group.rank:
                    self.numbers[rank].put(made, parts[rank, :, :, :count])
            return made

        return finish

    def begin_return(self, gradients: Tensor) -> Arrival:
        """Begin to bring (rows, heads, others, features) to their owners; return what waits for this rank's sums."""
        rows, heads, _, features = gradients.shape
        gradients = wide(gradients)
        parts = gradients.new_zeros((self.group.size, rows, heads, self.rows.most, features))
        for rank, count in enumerate(self.rows.counts):
            if rank != self.group.rank:
                self.numbers[rank].take(gradients, parts[rank, :, :, :count])
        wait = self.group.begin_scatter(parts)
        return lambda: wait()[:, :, : self.rows.counts[self.rows.rank]]


@dataclass(frozen=True, eq=False)
class Halo:
    """The tokens of other ranks that one rank's queries reach, and its own that others' reach.

    Attributes:
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
        ranks, me, length = range(group.size), group.rank, rows.length
        places = [rows.of_ranks[rank].expand(count, -1) for rank in ranks]
        needs = [_needed(reach.take(its), length) for its in places]
        flags = [[needs[taker].gather(1, places[giver]) & (taker != giver) for taker in ranks] for giver in ranks]
        tokens = torch.stack([torch.stack([flag.sum() for flag in of_giver]) for of_giver in flags]).tolist()
        found = [flags[giver][me] for giver in ranks]
        numbers = torch.arange(count, device=places[me].device)[:, None]
        row = torch.cat([numbers.expand_as(flag)[flag] for flag in found])
        place = torch.cat([its[flag] for its, flag in zip(places, found, strict=True)])
        # the tokens row by row and by place, (rows, most in a row)
        order, in_row = (row * length + place).argsort(), torch.bincount(row, minlength=count)
        number = torch.arange(int(in_row.max()), device=row.device)
        is_filler = number >= in_row[:, None]
        order = order[((in_row.cumsum(0) - in_row)[:, None] + number).masked_fill(is_filler, 0)]
        held, by_place = order.masked_fill(is_filler, 0), place[order].masked_fill(is_filler, length)
        is_token = (by_place < length).flatten().nonzero()[:, 0]
        sent = torch.cat([flag.flatten().nonzero()[:, 0] for flag in flags[me]])
        receives, most = [of_giver[me] for of_giver in tokens], max(map(sum, tokens))
        own = places[me].shape[1]
        return cls(group, sent, tokens[me], receives, most, own, held.flatten(), by_place, is_token)

    def begin_fetch(self, x: Tensor) -> Arrival:
        """Begin to fetch; see ``Gathered``."""
        heads, features = x.shape[1], x.shape[3]
        tokens = x.transpose(1, 2).flatten(2, 3).flatten(0, 1)
        wait = self._begin_trade(tokens[kept_on(self.sent, x.device)], self.sends, self.receives)
        shape = (*self.places.shape, heads, features)
        return lambda: wait()[kept_on(self.held, x.device)].view(shape).transpose(1, 2)

    def begin_return(self, gradients: Tensor) -> Arrival:
        """Begin to bring gradients to their owners; see ``Gathered``."""
        rows, heads, _, features = gradients.shape
        size = heads * features
        held, tokens, sent = (kept_on(x, gradients.device) for x in (self.held, self.tokens, self.sent))
        flat = wide(gradients).transpose(1, 2).reshape(-1, size)[tokens]
        others = flat.new_empty((sum(self.receives), size)).index_copy_(0, held[tokens], flat)
        wait = self._begin_trade(others, self.receives, self.sends)

        def finish() -> Tensor:
            mine = flat.new_zeros((rows * self.own, size)).index_add_(0, sent, wait())
            return mine.view(rows, self.own, heads, features).transpose(1, 2)

        return finish

    def _begin_trade(self, tokens: Tensor, sends: list[int], receives: list[int]) -> Arrival:
        """Begin to trade tokens, (tokens, numbers of each)."""
        size = tokens.shape[1]
        wait = self.group.begin_trade(tokens.flatten(), [n * size for n in sends], [n * size for n in receives])
        return lambda: wait().view(-1, size)


def _needed(reach: KeyRanges, length: int) -> Tensor:
    """Return which tokens some query reaches: (rows, length) bool."""
    edges = reach.lower.new_zeros((len(reach.lower), length + 1))
    ones = (reach.lower < reach.upper).to(edges.dtype)
    edges.scatter_add_(1, reach.lower.clamp(max=length), ones).scatter_add_(1, reach.upper.clamp(max=length), -ones)
    return edges.cumsum(1)[:, :length] > 0


@dataclass(frozen=True, eq=False)
class Arriving(Keys):
    """A rank's own keys, and those that arrive from others; each reach counts its keys by their numbers."""

    exchange: Gathered | Halo
    own: KeyRanges
    others: KeyRanges

    @classmethod
    def of(cls, exchange: Gathered | Halo, reach: KeyRanges, own: Tensor) -> Arriving:
        """Count the keys of a reach by places; ``own``: places of the own keys, (rows or 1, keys)."""
        return cls(exchange, reach.among(own), reach.among(exchange.places))

    def fetch(self, key: Tensor, value: Tensor) -> Arrival:
        return functools.cache(self.exchange.begin_fetch(torch.cat((key, value), dim=-1)))

    def attend(self, operands: Operands, scores: Scores, arrive: Arrival | None) -> tuple[Tensor, Tensor]:
        assert arrive is not None
        found, (query, key, value) = Attended(), operands
        found.add(query, key, value, self.own, scores)
        other_key, other_value = arrive().split((key.shape[-1], value.shape[-1]), dim=-1)
        found.add(query, other_key, other_value, self.others, scores)
        return found.finish()

    def gradients(self, given: Given, operands: Operands, scores: Scores, others: Tensor | None) -> Gradients:
        assert others is not None
        query, key, value = operands
        features = (key.shape[-1], value.shape[-1])
        other_key, other_value = others.split(features, dim=-1)
        of_others = gradients_of(given, query, other_key, other_value, self.others, scores)
        wait = self.exchange.begin_return(torch.cat((of_others.key, of_others.value), dim=-1))
        own = gradients_of(given, query, key, value, self.own, scores, into=wide(of_others.query))
        for_key, for_value = wait().split(features, dim=-1)
        return Gradients(own.query, own.key + for_key, own.value + for_value)


# --- attend to keys and values that go round a ring of ranks


@dataclass(frozen=True, eq=False)
class Ring(Keys):
    """Ranks that pass parts of rows on.

    Attributes:
        group: the ranks, of which every ``step``-th is on this ring.
        position: this rank's number on the ring.
        places: of each part's tokens in their rows, (rows or 1, tokens) int64 ascending, by their owner's number.
        reaches: of this rank's queries among the keys of each part, in the order in which the parts come.
    """

    group: RankGroup
    position: int
    places: tuple[Tensor, ...]
    reaches: list[KeyRanges]
    step: int = 1
    sends = True

    @classmethod
    def of(cls, group: RankGroup, position: int, places: tuple[Tensor, ...], reach: KeyRanges, step: int = 1) -> Ring:
        """Count the keys of a reach by places."""
        of_parts = [places[(position - passed) % len(places)] for passed in range(len(places))]
        return cls(group, position, places, [reach.among(part) for part in of_parts], step)

    def attend(self, operands: Operands, scores: Scores, arrive: Arrival | None) -> tuple[Tensor, Tensor]:
        query, key, value = operands
        found, flat = Attended(), _packed(key, value)
        for passed, reach in enumerate(self.reaches):
            is_last = passed + 1 == len(self.places)
            wait = None if is_last else self._pass_on(flat, passed, key, value)
            passing_key, passing_value = self._unpacked(flat, passed, key, value)
            found.add(query, passing_key, passing_value, reach, scores)
            flat = flat if wait is None else wait()
        return found.finish()

    def gradients(self, given: Given, operands: Operands, scores: Scores, others: Tensor | None) -> Gradients:
        """Sum gradients; those of a part begin behind its owner, and come home with the last step."""
        query, key, value = operands
        flat, arriving = _packed(key, value), None
        own = here = None
        for passed, reach in enumerate(self.reaches):
            is_last = passed + 1 == len(self.places)
            wait = None if is_last else self._pass_on(flat, passed, key, value)
            into = None if here is None else wide(here.query)
            passing_key, passing_value = self._unpacked(flat, passed, key, value)
            here = gradients_of(given, query, passing_key, passing_value, reach, scores, into=into)
            if own is None:
                own = here
            else:
                travelling = wide(_packed(here.key, here.value))
                if arriving is not None:
                    travelling.add_(arriving())
                arriving = self._pass_on(travelling, passed, key, value)
            flat = flat if wait is None else wait()
        assert own is not None and here is not None
        if arriving is None:
            return own
        for_key, for_value = self._unpacked(arriving(), len(self.places), key, value)
        return Gradients(here.query, own.key + for_key, own.value + for_value)

    def _pass_on(self, flat: Tensor, passed: int, key: Tensor, value: Tensor) -> Arrival:
        """Begin to pass on the part that is here after so many steps; returns the function that waits for the next."""
        elements = sum(map(math.prod, self._shapes(passed + 1, key, value)))
        return self.group.pass_on(flat, elements, self.step)

    def _unpacked(self, flat: Tensor, passed: int, key: Tensor, value: Tensor) -> list[Tensor]:
        """View the keys and values, or their gradients, of the part that is here after so many steps."""
        shapes = self._shapes(passed, key, value)
        return [*map(Tensor.view, flat.split_with_sizes([*map(math.prod, shapes)]), shapes)]

    def _shapes(self, passed: int, key: Tensor, value: Tensor) -> tuple[tuple[int, ...], tuple[int, ...]]:
        tokens = self.places[(self.position - passed) % len(self.places)].shape[1]
        return (*key.shape[:2], tokens, key.shape[3]), (*value.shape[:2], tokens, value.shape[3])


def _packed(key: Tensor, value: Tensor) -> Tensor:
    alike = key.shape == value.shape  # one copy of heads that lie apart, instead of two
    return torch.stack((key, value)).flatten() if alike else torch.cat((key.flatten(), value.flatten()))


# --- trade tokens for heads

Shares = tuple[range, ...]
"""The heads of each member."""


class Message(NamedTuple):
    """The shapes in which tensors lie in a message, (rows, heads, tokens, features), by member and tensor.

    ``elements``: of each part; ``sizes``: for every rank of the group.
    """

    shapes: list[list[tuple[int, ...]]]
    elements: list[int]
    sizes: list[int]

    def parts(self, flat: Tensor) -> list[list[Tensor]]:
        """View a message's parts, by member and tensor."""
        pieces = iter(flat.split(self.elements))
        return [[next(pieces).view(shape) for shape in of_member] for of_member in self.shapes]


@functools.cache
def shares_of_heads(heads: int, key_heads: int, ranks: int) -> tuple[Shares, Shares]:
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
        messages: those that were sent, by the shapes of their tensors.
    """

    group: RankGroup
    first: int
    count: int
    rows: CutRows
    numbers: tuple[Numbers, ...]
    places: Tensor
    messages: dict[Any, tuple[Message, Message]] = field(default_factory=dict)

    @classmethod
    @by_values
    def of(cls, group: RankGroup, rows: CutRows, first: int, count: int) -> Members:
        of_members = [rows.of_ranks[rank] for rank in range(first, first + count)]
        places = torch.cat(of_members, dim=1).sort(dim=1).values
        numbers = tuple(Numbers.of(torch.searchsorted(places, own.contiguous())) for own in of_members)
        return cls(group, first, count, rows, numbers, places)

    def messages_of(self, tensors: Sequence[Tensor], shares: tuple[Shares, ...]) -> tuple[Message, Message]:
        """Return the message of each member's heads of this rank's tokens, and of this rank's heads of each's tokens.

        The layers of a microbatch share them.
        """
        rows, features = tensors[0].shape[0], tuple([x.shape[3] for x in tensors])
        if (key := (rows, features, shares)) not in self.messages:
            me, everyone = self.group.rank - self.first, range(self.count)
            counts = self.rows.counts[self.first : self.first + self.count]
            before, behind = [0] * self.first, [0] * (self.group.size - self.first - self.count)

            def message(pairs: list[tuple[int, int]]) -> Message:
                shapes = [
                    [(rows, len(share[heads]), counts[tokens], n) for share, n in zip(shares, features, strict=True)]
                    for heads, tokens in pairs
                ]
                elements = [math.prod(shape) for of_member in shapes for shape in of_member]
                return Message(shapes, elements, [*before, *(sum(map(math.prod, s)) for s in shapes), *behind])

            self.messages[key] = message([(i, me) for i in everyone]), message([(me, i) for i in everyone])
        return self.messages[key]


def members_of(group: RankGroup, rows: CutRows, first: int, count: int) -> Members:
    """Return members that the microbatch's layers share."""
    if (key := ("members", first, count)) not in rows.memo:
        rows.memo[key] = Members.of(group, rows, first, count)
    return rows.memo[key]


def trade(
    tensors: Sequence[Tensor], shares: tuple[Shares, ...], members: Members, *, to_heads: bool
) -> tuple[Tensor, ...]:
    """Trade tensors (rows, heads, own tokens, features) for (rows, own heads, members' tokens, features), or back.

    They travel in one message, and are of one dtype; tokens are in rows' order. What several members bring back of one
    head is summed.
    """
    return _Trade.apply(to_heads, shares, members, *tensors)  # type: ignore[no-any-return]


class _Trade(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, to_heads: bool, shares: tuple[Shares, ...], members: Members, *tensors: Tensor) -> Any:
        ctx.given = to_heads, shares, members
        return tuple((_heads if to_heads else _tokens)(tensors, shares, members))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        to_heads, shares, members = ctx.given
        return None, None, None, *(_tokens if to_heads else _heads)(gradients, shares, members)


def _heads(tensors: Sequence[Tensor], shares: tuple[Shares, ...], members: Members) -> list[Tensor]:
    scattered, collected = members.messages_of(tensors, shares)
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


def _tokens(tensors: Sequence[Tensor], shares: tuple[Shares, ...], members: Members) -> list[Tensor]:
    scattered, collected = members.messages_of(tensors, shares)
    flat = tensors[0].new_empty(sum(collected.elements))
    for parts, numbers in zip(collected.parts(flat), members.numbers, strict=True):
        for x, part in zip(tensors, parts, strict=True):
            numbers.take(x, part)
    received = scattered.parts(members.group.trade(flat, collected.sizes, scattered.sizes))
    return [_joined([parts[i] for parts in received], share) for i, share in enumerate(shares)]


def _joined(parts: list[Tensor], shares: Shares) -> Tensor:
    """Put heads together, of which several members may have had the same one: those are summed."""
    heads = max([share.stop for share in shares])
    if sum(map(len, shares)) == heads:
        return torch.cat(parts, dim=1)
    rows, _, tokens, features = parts[0].shape
    made = parts[0].new_zeros((rows, heads, tokens, features), dtype=wide(parts[0][:0]).dtype)
    for part, share in zip(parts, shares, strict=True):
        made[:, share.start : share.stop] += part
    return made.to(parts[0].dtype)
