"""Compute attention by a fused kernel where queries reach rectangles and triangles of keys.

Consecutive queries that begin at the same key, and end at the same one or each one further than the query before,
reach a rectangle of keys and, in the second case, a triangle behind it: a run of a causal row, or a document of one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import wraps
from typing import TypeVar
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from meshwright.core.torch_private import by_values
from meshwright.introspection.mixing.reach import KeyRanges

from .fused import Fused

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
