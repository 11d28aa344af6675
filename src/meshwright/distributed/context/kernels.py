"""Compute attention of the keys that a rank has: in blocks, or by fused kernels on runs of queries.

Consecutive queries that begin at the same key, and end at the same one or each one further than the query before,
reach a rectangle of keys and, in the second case, a triangle behind it: a run of a causal row, or a document of one.

The softmax is carried on from block to block by its running maximum and sum (Milakov and Gimelshein 2018, arXiv
1805.02867), as in FlashAttention (Dao et al. 2022, arXiv 2205.14135; its backward from the logarithm of the sum, Dao
2023, arXiv 2307.08691). Blocks that no query reaches are passed over. Scores, sums and gradients are at least fp32.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, wraps
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

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

    def given(self, x: Tensor) -> Tensor:
        """Return a tensor in the dtype in which the kernel computes."""
        return wide(x) if self.kernel.widens else x


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
    dtype = str(query.dtype).removeprefix("torch.")
    return _fused(Need(query.device.type, dtype, query.shape[-1], value.shape[-1], has_cap, has_sinks))


@functools.cache
def _fused(need: Need) -> Fused | None:
    return FUSED.get(choose_kernel(need)[0].name)


# --- compute attention by a fused kernel where queries reach rectangles and triangles of keys

SHORTEST = 32
"""Mean queries of a segment below which the kernel is called too often."""


@dataclass(frozen=True)
class Segment:
    """Some queries with the keys that they reach.

    Attributes:
        rows, queries: where the queries are.
        keys: those that all queries reach, or the queries' own, of which each reaches those up to its own.
        is_causal: keys are the queries' own.
        is_first: no segment before has some of these queries.
    """

    rows: slice
    queries: slice
    keys: slice
    is_causal: bool
    is_first: bool = True


Found = TypeVar("Found")


def once_for_each_reach(function: Callable[[KeyRanges], Found]) -> Callable[[KeyRanges], Found]:
    """Remember what a function found for a reach as long as that exists: all layers and the backward ask again."""
    known: WeakKeyDictionary[KeyRanges, Found] = WeakKeyDictionary()

    @wraps(function)
    def of(reach: KeyRanges) -> Found:
        if reach not in known:
            known[reach] = function(reach)
        return known[reach]

    return of


@once_for_each_reach
@by_values
def segments(reach: KeyRanges) -> list[Segment] | None:
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


def _of_queries(rows: slice, queries: slice, low: int, high: int, *, grows: bool) -> Iterator[Segment]:
    if high <= low:
        if grows:  # the first query reaches nothing, and the keys of the others begin one further on
            yield from _of_queries(rows, slice(queries.start + 1, queries.stop), low, high + 1, grows=True)
        return
    whole = slice(low, high - 1 if grows else high)
    if whole.start < whole.stop:
        yield Segment(rows, queries, whole, False)
    if grows:
        own = slice(high - 1, high - 1 + queries.stop - queries.start)
        yield Segment(rows, queries, own, True, is_first=whole.start >= whole.stop)


def attend(
    fused: Fused, query: Tensor, key: Tensor, value: Tensor, segment: Segment, scale: float
) -> tuple[Tensor, Tensor]:
    """Return a segment's attention, shaped as its queries, and its logarithms.

    Args:
        query: (rows, key heads, heads per key head, queries, features), of the segment.
        key, value: (rows, key heads, keys, features), of the segment.
    """
    given = _as_queries(query, segment), _as_heads(query, key, segment), _as_heads(query, value, segment)
    output, logarithm = fused.forward(*map(fused.given, given), is_causal=segment.is_causal, scale=scale)
    return output.reshape(*query.shape[:4], -1), logarithm.reshape(query.shape[:4])


def gradients(
    fused: Fused,
    gradient: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    output: Tensor,
    logarithm: Tensor,
    segment: Segment,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of a segment's queries, keys and values, from output and logarithms over all keys.

    Args:
        gradient, output: (rows, key heads, heads per key head, queries, value features).
        logarithm: (rows, key heads, heads per key head, queries).
    """
    flat = fused.given(_as_queries(query, segment))
    keys, values = (fused.given(_as_heads(query, x, segment)) for x in (key, value))
    gradient, output = (_as_queries(x, segment).to(flat.dtype) for x in (gradient, output))
    sums = _as_queries(logarithm[..., None], segment)[..., 0]
    options = {"is_causal": segment.is_causal, "scale": scale}
    for_query, for_key, for_value = fused.backward(gradient, flat, keys, values, output, sums, **options)
    if segment.is_causal and query.shape[2] > 1:
        for_key, for_value = (x.unflatten(1, query.shape[1:3]).sum(2) for x in (for_key, for_value))
    return for_query.reshape(query.shape), for_key, for_value


def _as_queries(x: Tensor, segment: Segment) -> Tensor:
    """Heads that share a key head lie behind each other as queries, except where keys are the queries' own."""
    return x.flatten(1, 2) if segment.is_causal else x.flatten(2, 3)


def _as_heads(query: Tensor, x: Tensor, segment: Segment) -> Tensor:
    if not segment.is_causal or query.shape[2] == 1:
        return x
    return x[:, :, None].expand(-1, -1, query.shape[2], -1, -1).flatten(1, 2)


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

    def segments(self, reach: KeyRanges, query: Tensor, value: Tensor) -> tuple[Fused, list[Segment]] | None:
        """Return a fused kernel and the segments that it computes; None where attention goes by blocks."""
        fused = fused_kernel(query, value, has_cap=self.cap is not None, has_sinks=self.sinks)
        parts = None if fused is None else segments(reach)
        return None if fused is None or parts is None else (fused, parts)

    def of(self, products: Tensor) -> Tensor:
        """Return the scores of scaled products, which may be overwritten."""
        return products if self.cap is None else products.div_(self.cap).tanh_().mul_(self.cap)

    def slope_at(self, scores: Tensor) -> Tensor | float:
        """Return the derivative of scores by scaled products."""
        return 1.0 if self.cap is None else 1 - (scores / self.cap) ** 2


@dataclass(frozen=True)
class Tile:
    """Some queries with some keys.

    Attributes:
        rows, queries, keys: where they are.
        is_whole: every query attends to every key.
    """

    rows: slice
    queries: slice
    keys: slice
    is_whole: bool


@once_for_each_reach
@by_values
def blocks(reach: KeyRanges) -> list[list[Tile]]:
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
                    Tile(of_row, queries, slice(key, end), key >= whole_from and end <= whole_to)
                    for key in range(first, last, KEYS)
                    for end in (min(key + KEYS, last),)
                ]
            )
    return made


Where = tuple[slice, ...]
"""Some queries: an index of (rows, key heads, heads per key head, queries, …)."""


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
        query = query.unflatten(1, (key.shape[1], -1))
        if self._is_empty and found is not None and _is_all(found[1], query):
            keys = (found[1][0].rows, slice(None), found[1][0].keys)
            self.output, self.logarithm = attend(found[0], query, key[keys], value[keys], found[1][0], scores.scale)
            self._is_empty = False
            return
        if self._is_empty:
            self.output = query.new_zeros((*query.shape[:4], value.shape[-1]), dtype=wide(query[:0]).dtype)
            self.logarithm = self.output.new_full(query.shape[:4], float("-inf"))
        self.output = wide(self.output)
        if found is None:
            for run in filter(None, blocks(reach)):
                at = (run[0].rows, slice(None), slice(None), run[0].queries)
                self._put(at, *_of_run(run, query[at], key, value, reach, scores), is_first=True)
        else:
            for part in found[1]:
                at, keys = (part.rows, slice(None), slice(None), part.queries), (part.rows, slice(None), part.keys)
                made = attend(found[0], query[at], key[keys], value[keys], part, scores.scale)
                self._put(at, *made, is_first=part.is_first)
        self._is_empty = False

    def _put(self, at: Where, output: Tensor, logarithm: Tensor, *, is_first: bool) -> None:
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


def _is_all(parts: list[Segment], query: Tensor) -> bool:
    """Return whether one segment has all queries."""
    return len(parts) == 1 and parts[0].rows == slice(None) and parts[0].queries == slice(0, query.shape[3])


def _of_run(
    run: list[Tile], query: Tensor, key: Tensor, value: Tensor, reach: KeyRanges, scores: Scores
) -> tuple[Tensor, Tensor]:
    """Return the output of one run of queries, and the logarithms."""
    some = wide(query) * scores.scale
    largest = some.new_full((*some.shape[:4], 1), float("-inf"))
    total, output = torch.zeros_like(largest), some.new_zeros((*some.shape[:4], value.shape[-1]))
    for block in run:
        made = _scores(some, key, block, reach, scores)
        more = torch.maximum(largest, made.amax(-1, keepdim=True))
        finite = more.masked_fill(more == float("-inf"), 0)
        made.sub_(finite).exp_()
        before = (largest - finite).exp_()
        total = total * before + made.sum(-1, keepdim=True)
        output = output * before + _product(made, wide(value[block.rows, :, block.keys]))
        largest = more
    return output / total.masked_fill(total == 0, 1), (largest + total.log())[..., 0]


@dataclass(frozen=True, eq=False)
class Given:
    """The gradients that attention's backward begins with.

    Attributes:
        for_output: of the output, (rows, heads, queries, features).
        output, logarithm: what the forward returned.
        for_logarithm: of the logarithms; None: none.
    """

    for_output: Tensor
    output: Tensor
    logarithm: Tensor
    for_logarithm: Tensor | None = None

    @cached_property
    def rest(self) -> Tensor:
        """(rows, heads, queries): the output times its gradient, less the logarithms' gradient."""
        products = (wide(self.for_output) * wide(self.output)).sum(-1)
        return products if self.for_logarithm is None else products - self.for_logarithm


@dataclass(frozen=True, eq=False)
class Gradients:
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
    grouped = query.unflatten(1, heads)
    for_output, output = (x.unflatten(1, heads) for x in (given.for_output, given.output))
    logarithm = given.logarithm.unflatten(1, heads)
    if into is None and found is not None and _is_all(found[1], grouped):
        (part,) = found[1]
        if part.keys == slice(0, key.shape[2]):
            made = gradients(found[0], for_output, grouped, key, value, output, logarithm, part, scores.scale)
            return Gradients(made[0].flatten(1, 2), *made[1:])
    sums = Gradients(
        torch.zeros_like(wide(query)) if into is None else into, *(torch.zeros_like(wide(x)) for x in (key, value))
    )
    if found is None:
        _add_of_blocks(sums, given, query, key, value, reach, scores)
        return sums
    for_query = sums.query.unflatten(1, heads)
    for part in found[1]:
        at, keys = (part.rows, slice(None), slice(None), part.queries), (part.rows, slice(None), part.keys)
        some = (for_output[at], grouped[at], key[keys], value[keys], output[at], logarithm[at])
        made = gradients(found[0], *some, part, scores.scale)
        for_query[at] += made[0]
        sums.key[keys] += made[1]
        sums.value[keys] += made[2]
    return sums


def _add_of_blocks(
    sums: Gradients, given: Given, query: Tensor, key: Tensor, value: Tensor, reach: KeyRanges, scores: Scores
) -> None:
    heads = (key.shape[1], -1)
    query, for_output, for_query = (x.unflatten(1, heads) for x in (query, given.for_output, sums.query))
    rest, logarithm = (x.unflatten(1, heads)[..., None] for x in (given.rest, given.logarithm))
    logarithm = logarithm.masked_fill(logarithm == float("-inf"), 0)
    for run in filter(None, blocks(reach)):
        at = (run[0].rows, slice(None), slice(None), run[0].queries)
        some, for_some = wide(query[at]) * scores.scale, wide(for_output[at])
        rest_of_some, sum_of_some = rest[at], logarithm[at]
        total = torch.zeros_like(some)
        for block in run:
            keys, values = (wide(x[block.rows, :, block.keys]) for x in (key, value))
            made = _scores(some, key, block, reach, scores)
            slope = scores.slope_at(made)
            share = (made - sum_of_some).exp_()
            sums.value[block.rows, :, block.keys] += _product_over_queries(share, for_some)
            share.mul_(_product(for_some, values.transpose(-1, -2)).sub_(rest_of_some))
            if scores.cap is not None:
                share.mul_(torch.as_tensor(slope).nan_to_num(0.0))
            total += _product(share, keys)
            sums.key[block.rows, :, block.keys] += _product_over_queries(share, some)
        for_query[at] += total * scores.scale


def _scores(query: Tensor, key: Tensor, block: Tile, reach: KeyRanges, scores: Scores) -> Tensor:
    """Return (rows, key heads, heads per key head, queries, keys), -inf where a query does not attend to a key."""
    made = scores.of(_product(query, wide(key[block.rows, :, block.keys]).transpose(-1, -2)))
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


def block_attention(
    query: Tensor, key: Tensor, value: Tensor, reach: KeyRanges, scores: Scores
) -> tuple[Tensor, Tensor]:
    """Attend to keys that are all here, counted by ``reach``.

    Returns:
        (rows, heads, queries, features) and the logarithms (rows, heads, queries).
    """
    return _BlockAttention.apply(query, key, value, reach, scores)  # type: ignore[no-any-return]


class _BlockAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, reach: KeyRanges, scores: Scores
    ) -> tuple[Tensor, Tensor]:
        def compute() -> tuple[Tensor, Tensor]:
            found = Attended()
            found.add(query, key, value, reach, scores)
            return found.finish()

        output, logarithm = attended(compute)
        ctx.save_for_backward(query, key, value, output, logarithm)
        ctx.reach, ctx.scores = reach, scores
        return output, logarithm

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, *made = ctx.saved_tensors
        given = given_of(ctx.scores, gradients, made)
        found = gradients_of(given, query, key, value, ctx.reach, ctx.scores)
        return found.query.to(query.dtype), found.key.to(key.dtype), found.value.to(value.dtype), None, None


def given_of(scores: Scores, gradients: Sequence[Tensor], made: Sequence[Tensor]) -> Given:
    """Return what a backward begins with, from the gradients of output and logarithms, and these themselves."""
    return Given(gradients[0], made[0], made[1], gradients[1] if scores.sinks else None)
