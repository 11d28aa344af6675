"""Compute attention of the keys that a rank has: in blocks, or by fused kernels on runs of queries.

Consecutive queries that begin at the same key, and end at the same one or each one further than the query before,
reach a rectangle of keys and, in the second case, a triangle behind it: a run of a causal row, or a document of one.

The softmax is carried on from block to block by its running maximum and sum (Milakov and Gimelshein 2018, arXiv
1805.02867), as in FlashAttention (Dao et al. 2022, arXiv 2205.14135; its backward from the logarithm of the sum, Dao
2023, arXiv 2307.08691). Blocks that no query reaches are passed over. Scores, sums and gradients are at least fp32.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property, wraps
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from meshwright.core import torch_private
from meshwright.core.torch_private import by_values
from meshwright.distributed.context.rows import kept_on
from meshwright.distributed.recompute.kept import attended
from meshwright.introspection.mixing.masks import KeyRanges
from meshwright.planning.context.kernels import (
    CPU_FLASH,
    CUDA_EFFICIENT,
    CUDA_FLASH,
    KERNELS,
    Kernel,
    Need,
    choose_kernel,
)

# --- run the fused kernels of attention that return the logarithms of their sums


@dataclass(frozen=True)
class Box:
    """Some queries with some keys.

    Attributes:
        is_whole: every query attends to every key.
        is_causal: keys are the queries' own, of which each reaches those up to its own.
        is_first: no box before has some of these queries.
    """

    rows: slice
    queries: slice
    keys: slice
    is_whole: bool = True
    is_causal: bool = False
    is_first: bool = True

    @cached_property
    def at(self) -> tuple[slice, ...]:
        """Where the queries are: an index of (rows, key heads, heads per key head, queries, …)."""
        return self.rows, slice(None), slice(None), self.queries

    @cached_property
    def keys_at(self) -> tuple[slice, ...]:
        """Where the keys are: an index of (rows, key heads, keys, …)."""
        return self.rows, slice(None), self.keys

    @cached_property
    def joined(self) -> tuple[int, int]:
        """Dims that become one: heads of a key head lie behind each other as queries, but where keys are their own."""
        return (1, 2) if self.is_causal else (2, 3)


@dataclass(frozen=True)
class Fused:
    """A fused kernel's two functions, for queries that see all keys, or as many keys as queries in causal order.

    Attributes:
        kernel: what it takes.
        forward: (query, key, value, *, is_causal, scale) -> output and logarithms (rows, heads, queries); tensors are
            (rows, heads, tokens, features).
        backward: (gradient, query, key, value, output, logarithm, *, is_causal, scale) -> gradients of the three;
            output and logarithms are those over all keys, of which these may be some.
    """

    kernel: Kernel
    forward: Callable[..., tuple[Tensor, Tensor]]
    backward: Callable[..., tuple[Tensor, Tensor, Tensor]]

    def attend(self, query: Tensor, key: Tensor, value: Tensor, box: Box, scale: float) -> tuple[Tensor, Tensor]:
        """Return a box's attention, shaped as its queries, and its logarithms.

        Queries are (rows, key heads, heads per key head, queries, features), keys (rows, key heads, keys, features).
        """
        output, logarithm = self.forward(*self._given(query, key, value, box), is_causal=box.is_causal, scale=scale)
        return output.reshape(*query.shape[:4], -1), logarithm.reshape(query.shape[:4])

    def gradients(
        self, query: Tensor, key: Tensor, value: Tensor, box: Box, scale: float, made: tuple[Tensor, Tensor, Tensor]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the gradients of a box's queries, keys and values.

        Args:
            made: the output's gradient, the output, and the logarithms, all over all keys; shaped as the queries.
        """
        flat, keys, values = self._given(query, key, value, box)
        gradient, output, sums = [x.flatten(*box.joined) for x in made]
        given = gradient.to(flat.dtype), flat, keys, values, output.to(flat.dtype), sums
        for_query, for_key, for_value = self.backward(*given, is_causal=box.is_causal, scale=scale)
        if box.is_causal and query.shape[2] > 1:
            for_key, for_value = (x.unflatten(1, query.shape[1:3]).sum(2) for x in (for_key, for_value))
        return for_query.reshape(query.shape), for_key, for_value

    def _given(self, query: Tensor, key: Tensor, value: Tensor, box: Box) -> Iterable[Tensor]:
        """Return queries, keys and values in the shapes and the dtype in which the kernel computes."""
        shared = query.shape[2]
        if box.is_causal and shared > 1:
            key, value = (x[:, :, None].expand(-1, -1, shared, -1, -1).flatten(1, 2) for x in (key, value))
        given = query.flatten(*box.joined), key, value
        return map(wide, given) if self.kernel.widens and query.dtype != torch.float32 else given


FUSED = {
    CPU_FLASH.name: Fused(CPU_FLASH, torch_private.flash_attention, torch_private.flash_attention_backward),
    CUDA_FLASH.name: Fused(CUDA_FLASH, torch_private.cuda_flash_attention, torch_private.cuda_flash_attention_backward),
    CUDA_EFFICIENT.name: Fused(
        CUDA_EFFICIENT, torch_private.efficient_attention, torch_private.efficient_attention_backward
    ),
}
"""By the name of the kernel; one that is not here is computed in blocks."""
assert len(FUSED) == len(KERNELS) - 1


def wide(x: Tensor) -> Tensor:
    """Return a tensor in at least fp32."""
    return x if x.dtype == torch.float32 else x.to(torch.promote_types(x.dtype, torch.float32))


def fused_kernel(query: Tensor, value: Tensor, *, has_cap: bool, has_sinks: bool) -> Fused | None:
    """Return the fused kernel that computes an attention; None where it goes in blocks alone."""
    return _fused_for(query.device.type, query.dtype, query.shape[-1], value.shape[-1], has_cap, has_sinks)


_fused_for = functools.cache(
    lambda device, dtype, *rest: FUSED.get(
        choose_kernel(Need(device, f"{dtype}".removeprefix("torch."), *rest))[0].name
    )
)


# --- compute attention by a fused kernel where queries reach rectangles and triangles of keys

SHORTEST = 32
"""Mean queries of a segment below which the kernel is called too often."""


Found = TypeVar("Found")


def once_for_each_reach(function: Callable[[KeyRanges], Found]) -> Callable[[KeyRanges], Found]:
    """Remember what a function found for a reach as long as that exists: all layers and the backward ask again."""

    @wraps(function)
    def of(reach: KeyRanges) -> Found:
        if (name := function.__name__) not in vars(reach):  # a field has another name
            vars(reach)[name] = function(reach)
        return vars(reach)[name]

    return of


@once_for_each_reach
@by_values
def segments(reach: KeyRanges) -> list[Box] | None:
    """Split queries into segments; None if there were many short ones."""
    rows, length = reach.lower.shape
    steps = reach.upper.diff(dim=1)
    same = (reach.lower.diff(dim=1) == 0) & ((steps == 0) | (steps == 1))
    # a segment goes on as it began: with keys that end alike, or each one further
    same[:, 1:] &= (steps[:, 1:] == steps[:, :-1]) | ~same[:, :-1]
    starts = torch.cat((same.new_ones((rows, min(length, 1))), ~same), dim=1)
    if length == 0 or int(starts.sum()) * SHORTEST > rows * length:
        return None
    found = []
    for row in range(rows):
        of_row = slice(None) if rows == 1 else slice(row, row + 1)
        first = starts[row].nonzero()[:, 0]
        ends = [*first[1:].tolist(), length]
        bounds = torch.stack((reach.lower[row][first], reach.upper[row][first]), dim=1).tolist()
        for start, end, (low, high) in zip(first.tolist(), ends, bounds, strict=True):
            grows = end - start > 1 and int(reach.upper[row][start + 1]) > high
            found += _of_queries(of_row, slice(start, end), low, high, grows=grows)
    return found


def _of_queries(rows: slice, queries: slice, low: int, high: int, *, grows: bool) -> Iterator[Box]:
    if high <= low:
        if grows:  # the first query reaches nothing, and the keys of the others begin one further on
            yield from _of_queries(rows, slice(queries.start + 1, queries.stop), low, high + 1, grows=True)
        return
    whole = slice(low, high - 1 if grows else high)
    if whole.start < whole.stop:
        yield Box(rows, queries, whole)
    if grows:
        own = slice(high - 1, high - 1 + queries.stop - queries.start)
        yield Box(rows, queries, own, is_causal=True, is_first=whole.start >= whole.stop)


# --- compute attention in blocks of queries and keys, of keys that come in parts, without a matrix of scores

QUERIES, KEYS = 256, 256
"""Sizes of a block."""


@dataclass(frozen=True)
class Scores:
    """How scores are made of products: ``cap`` · tanh(``scale`` · products / ``cap``), without a cap the products.

    Attributes:
        sinks: the sums' logarithms are used beside the output, and have gradients.
    """

    scale: float
    cap: float | None = None
    sinks: bool = False

    def segments(self, reach: KeyRanges, query: Tensor, value: Tensor) -> tuple[Fused, list[Box]] | None:
        """Return a fused kernel and the segments that it computes; None where attention goes by blocks."""
        fused = fused_kernel(query, value, has_cap=self.cap is not None, has_sinks=self.sinks)
        parts = None if fused is None else segments(reach)
        return None if fused is None or parts is None else (fused, parts)


@once_for_each_reach
@by_values
def blocks(reach: KeyRanges) -> list[list[Box]]:
    """Return, for one run of queries after another, the blocks of keys that they reach."""
    made = []
    rows, length = reach.lower.shape
    starts = list(range(0, length, QUERIES))
    for row in range(rows):
        of_row = slice(None) if rows == 1 else slice(row, row + 1)
        lower, upper = reach.lower[row], reach.upper[row]
        none = lower >= upper
        most = int(upper.max()) if length else 0
        bounds = torch.stack(
            [
                torch.stack((low.min(), up.max(), lower[part].max(), upper[part].min()))
                for part in (slice(start, start + QUERIES) for start in starts)
                for low in (lower[part].masked_fill(none[part], most),)
                for up in (upper[part].masked_fill(none[part], 0),)
            ]
        ).tolist()
        for start, (first, last, whole_from, whole_to) in zip(starts, bounds, strict=True):
            queries = slice(start, min(start + QUERIES, length))
            made.append(
                [
                    Box(of_row, queries, slice(key, end), key >= whole_from and end <= whole_to)
                    for key in range(first, last, KEYS)
                    for end in (min(key + KEYS, last),)
                ]
            )
    return made


class Attended:
    """Attention to the keys that have come so far.

    Attributes:
        output: (rows, key heads, heads per key head, queries, features), zero for queries without keys; in at least
            fp32 once several parts were merged.
        logarithm: (rows, key heads, heads per key head, queries), of the exponentials' sum.
    """

    output: Tensor
    logarithm: Tensor

    def __init__(self) -> None:
        self._is_empty = True

    def add(self, query: Tensor, key: Tensor, value: Tensor, reach: KeyRanges, scores: Scores) -> None:
        """Attend to more keys; ``reach`` counts them."""
        found = scores.segments(reach, query, value)
        query = torch.unflatten(query, 1, (key.shape[1], -1))
        if self._is_empty and found is not None and _is_all(found[1], query):
            keys = found[1][0].keys_at
            self.output, self.logarithm = found[0].attend(query, key[keys], value[keys], found[1][0], scores.scale)
            self._is_empty = False
            return
        if self._is_empty:
            self.output = query.new_zeros((*query.shape[:4], value.shape[-1]), dtype=wide(query[:0]).dtype)
            self.logarithm = self.output.new_full(query.shape[:4], float("-inf"))
        self.output = wide(self.output)
        if found is None:
            for run in filter(None, blocks(reach)):
                some = wide(query[run[0].at]) * scores.scale
                largest = some.new_full((*some.shape[:4], 1), float("-inf"))
                total, output = torch.zeros_like(largest), some.new_zeros((*some.shape[:4], value.shape[-1]))
                for block in run:
                    made = _scores(some, key, block, reach, scores)
                    more = torch.maximum(largest, made.amax(-1, keepdim=True))
                    finite = more.masked_fill(more == float("-inf"), 0)
                    made.sub_(finite).exp_()
                    before = (largest - finite).exp_()
                    total = total * before + made.sum(-1, keepdim=True)
                    output = output * before + _product(made, wide(value[block.keys_at]))
                    largest = more
                output, logarithm = output / total.masked_fill(total == 0, 1), (largest + total.log())[..., 0]
                self._put(run[0].at, output, logarithm, is_first=True)
        else:
            for part in found[1]:
                made = found[0].attend(query[part.at], key[part.keys_at], value[part.keys_at], part, scores.scale)
                self._put(part.at, *made, is_first=part.is_first)
        self._is_empty = False

    def _put(self, at: tuple[slice, ...], output: Tensor, logarithm: Tensor, *, is_first: bool) -> None:
        """Merge attention to some keys; ``is_first``: in these keys' own order, the first for these queries."""
        if self._is_empty and is_first:
            self.output[at], self.logarithm[at] = output, logarithm
            return
        before = self.logarithm[at]
        total = torch.logaddexp(before, logarithm)
        finite = total.masked_fill(total == float("-inf"), 0)
        self.output[at].mul_((before - finite).exp_()[..., None])
        self.output[at].addcmul_(wide(output), (logarithm - finite).exp_()[..., None])
        self.logarithm[at] = total

    def finish(self) -> tuple[Tensor, Tensor]:
        """Return (rows, heads, queries, features) and the logarithms (rows, heads, queries)."""
        return self.output.flatten(1, 2), self.logarithm.flatten(1, 2)


def _is_all(parts: list[Box], query: Tensor) -> bool:
    """Return whether one segment has all queries."""
    return len(parts) == 1 and parts[0].rows == slice(None) and parts[0].queries == slice(0, query.shape[3])


@dataclass(frozen=True, eq=False)
class Given:
    """The gradients that attention's backward begins with, (rows, heads, queries, …), and what the forward returned."""

    for_output: Tensor
    output: Tensor
    logarithm: Tensor
    for_logarithm: Tensor | None = None

    @cached_property
    def rest(self) -> Tensor:
        """(rows, heads, queries): the output times its gradient, less the logarithms' gradient."""
        products = (wide(self.for_output) * wide(self.output)).sum(-1)
        return products if self.for_logarithm is None else products - self.for_logarithm


class Gradients(NamedTuple):
    """Gradients of attention to some keys; those of queries are of these keys, or summed with others."""

    query: Tensor
    key: Tensor
    value: Tensor


def gradients_of(
    given: Given,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    reach: KeyRanges,
    scores: Scores,
    into: Tensor | None = None,
) -> Gradients:
    """Return the gradients of attention to some keys, which ``reach`` counts; at least fp32 where several are summed.

    Args:
        into: a sum of gradients of the queries, to which these are added, and which is returned.
    """
    found = scores.segments(reach, query, value)
    heads = (key.shape[1], -1)
    grouped, for_output = torch.unflatten(query, 1, heads), torch.unflatten(given.for_output, 1, heads)
    output, logarithm = torch.unflatten(given.output, 1, heads), torch.unflatten(given.logarithm, 1, heads)
    if into is None and found is not None and _is_all(found[1], grouped):
        (part,) = found[1]
        if part.keys == slice(0, key.shape[2]):
            made = for_output, output, logarithm
            for_query, *others = found[0].gradients(grouped, key, value, part, scores.scale, made)
            return Gradients(for_query.flatten(1, 2), *others)
    zeros = map(torch.zeros_like, map(wide, (key, value)))
    sums = Gradients(torch.zeros_like(wide(query)) if into is None else into, *zeros)
    for_query = torch.unflatten(sums.query, 1, heads)
    if found is None:
        rest, logarithm = given.rest.unflatten(1, heads)[..., None], logarithm[..., None]
        logarithm = logarithm.masked_fill(logarithm == float("-inf"), 0)
        for run in filter(None, blocks(reach)):
            at = run[0].at
            some, for_some = wide(grouped[at]) * scores.scale, wide(for_output[at])
            total = torch.zeros_like(some)
            for block in run:
                keys, values = (wide(x[block.keys_at]) for x in (key, value))
                made = _scores(some, key, block, reach, scores)
                share = (made - logarithm[at]).exp_()
                sums.value[block.keys_at] += _product_over_queries(share, for_some)
                share.mul_(_product(for_some, values.transpose(-1, -2)).sub_(rest[at]))
                if scores.cap is not None:
                    share.mul_((1 - (made / scores.cap) ** 2).nan_to_num(0.0))  # the slope of scores by products
                total += _product(share, keys)
                sums.key[block.keys_at] += _product_over_queries(share, some)
            for_query[at] += total * scores.scale
        return sums
    for part in found[1]:
        at, keys = part.at, part.keys_at
        made = for_output[at], output[at], logarithm[at]
        of_part = found[0].gradients(grouped[at], key[keys], value[keys], part, scores.scale, made)
        for whole, of, some in zip((for_query, sums.key, sums.value), (at, keys, keys), of_part, strict=True):
            whole[of] += some
    return sums


def _scores(query: Tensor, key: Tensor, block: Box, reach: KeyRanges, scores: Scores) -> Tensor:
    """Return (rows, key heads, heads per key head, queries, keys), -inf where a query does not attend to a key."""
    made = _product(query, wide(key[block.keys_at]).transpose(-1, -2))
    if scores.cap is not None:
        made = made.div_(scores.cap).tanh_().mul_(scores.cap)
    if block.is_whole:
        return made
    keys = torch.arange(block.keys.start, block.keys.stop, device=key.device)
    lower, upper = (kept_on(bound, key.device)[block.rows, block.queries, None] for bound in (reach.lower, reach.upper))
    blocked = (keys < lower) | (keys >= upper)
    return made.masked_fill_(blocked[:, None, None], float("-inf"))


def _product(x: Tensor, y: Tensor) -> Tensor:
    """(rows, key heads, heads per key head, n, a) by (rows, key heads, a, b)."""
    return (x.flatten(2, 3) @ y).unflatten(2, x.shape[2:4])


def _product_over_queries(x: Tensor, y: Tensor) -> Tensor:
    """(rows, key heads, heads per key head, n, a) and (…, n, b) -> (rows, key heads, a, b), summed over heads and n."""
    return x.flatten(2, 3).transpose(-1, -2) @ y.flatten(2, 3)


# --- compute attention, wherever its keys come from

Arrival = Callable[[], Tensor]
"""Waits for a message, and returns what it brings."""


Operands = tuple[Tensor, Tensor, Tensor]
"""Query, key and value, (rows, heads, own tokens, features) each."""


class Keys:
    """Where the keys of a call come from, and how far its queries reach among them.

    Attributes:
        sends: attending sends messages, so that a policy that saves exchanges saves the result too.
    """

    sends = False

    def fetch(self, key: Tensor, value: Tensor) -> Arrival | None:
        """Begin to fetch the keys and values of others that the backward needs too."""
        return None

    def attend(self, operands: Operands, scores: Scores, arrive: Arrival | None) -> tuple[Tensor, Tensor]:
        """Return the output and the logarithms."""
        raise NotImplementedError

    def gradients(self, given: Given, operands: Operands, scores: Scores, others: Tensor | None) -> Gradients:
        """Return the gradients; ``others``: what was fetched."""
        raise NotImplementedError


@dataclass(frozen=True, eq=False)
class KeysAtHand(Keys):
    """Keys that are all here, counted by ``reach``."""

    reach: KeyRanges

    def attend(self, operands: Operands, scores: Scores, arrive: Arrival | None) -> tuple[Tensor, Tensor]:
        found = Attended()
        found.add(*operands, self.reach, scores)
        return found.finish()

    def gradients(self, given: Given, operands: Operands, scores: Scores, others: Tensor | None) -> Gradients:
        return gradients_of(given, *operands, self.reach, scores)


def attention(query: Tensor, key: Tensor, value: Tensor, keys: Keys, scores: Scores) -> tuple[Tensor, Tensor]:
    """Return (rows, heads, queries, features) and the logarithms (rows, heads, queries)."""
    return _Attention.apply(query, key, value, keys, scores)  # type: ignore[no-any-return]


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, keys: Keys, scores: Scores
    ) -> tuple[Tensor, Tensor]:
        arrive = keys.fetch(key, value)
        made = attended(lambda: keys.attend((query, key, value), scores, arrive), exchanges=keys.sends)
        # a recomputation that has the output needs the keys of others all the same
        ctx.save_for_backward(query, key, value, None if arrive is None else arrive(), *made)
        ctx.keys, ctx.scores = keys, scores
        return made

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, others, *made = ctx.saved_tensors
        given = Given(gradients[0], made[0], made[1], gradients[1] if ctx.scores.sinks else None)
        found = ctx.keys.gradients(given, (query, key, value), ctx.scores, others)
        return found.query.to(query.dtype), found.key.to(key.dtype), found.value.to(value.dtype), None, None
