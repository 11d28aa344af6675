"""Compute attention in blocks of queries and keys, of keys that come in parts, without a matrix of scores.

The softmax is carried on from block to block by its running maximum and sum (Milakov and Gimelshein 2018, arXiv
1805.02867), as in FlashAttention (Dao et al. 2022, arXiv 2205.14135; its backward from the logarithm of the sum, Dao
2023, arXiv 2307.08691). Blocks that no query reaches are passed over. Scores, sums and gradients are at least fp32.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from meshwright.core.torch_private import by_values
from meshwright.distributed.recompute.kept import attended
from meshwright.introspection.mixing.reach import KeyRanges

from .segments import Segment, attend, gradients, segments

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

    def segments(self, reach: KeyRanges, query: Tensor, value: Tensor) -> list[Segment] | None:
        """Return the segments that torch's kernel computes; None where attention goes by blocks."""
        alike = query.shape[-1] == value.shape[-1] and query.device.type == "cpu"
        return segments(reach) if alike and self.cap is None and not self.sinks else None

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


def wide(x: Tensor) -> Tensor:
    """Return a tensor in at least fp32."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


class Attended:
    """Attention to the keys that have come so far.

    Attributes:
        largest, total: (rows, key heads, heads per key head, queries, 1), of the exponentials' running sum.
        output: (rows, key heads, heads per key head, queries, features), to be divided by ``total``.
    """

    def __init__(self, query: Tensor, key_heads: int, features: int):
        rows, heads, queries, _ = query.shape
        shape, kind = (rows, key_heads, heads // key_heads, queries), wide(query[:0]).dtype
        self.largest = query.new_full((*shape, 1), float("-inf"), dtype=kind)
        self.total = query.new_zeros((*shape, 1), dtype=kind)
        self.output = query.new_zeros((*shape, features), dtype=kind)

    def add(self, query: Tensor, key: Tensor, value: Tensor, reach: KeyRanges, scores: Scores) -> None:
        """Attend to more keys; ``reach`` counts them."""
        parts = scores.segments(reach, query, value)
        query = query.unflatten(1, (key.shape[1], -1))
        if parts is None:
            self._add_blocks(query, key, value, reach, scores)
            return
        for part in parts:
            at, keys = (part.rows, slice(None), slice(None), part.queries), (part.rows, slice(None), part.keys)
            output, logarithm = attend(wide(query[at]), wide(key[keys]), wide(value[keys]), part, scores.scale)
            self._merge(at, logarithm[..., None], torch.ones_like(logarithm[..., None]), output)

    def _merge(self, at: tuple[slice, ...], largest: Tensor, total: Tensor, output: Tensor) -> None:
        more = torch.maximum(self.largest[at], largest)
        before, now = (self.largest[at] - more).exp_(), (largest - more).exp_()
        self.total[at] = self.total[at] * before + total * now
        self.output[at] = self.output[at] * before + output * now
        self.largest[at] = more

    def _add_blocks(self, query: Tensor, key: Tensor, value: Tensor, reach: KeyRanges, scores: Scores) -> None:
        for run in blocks(reach):
            if not run:
                continue
            at = (run[0].rows, slice(None), slice(None), run[0].queries)
            some = wide(query[at]) * scores.scale
            largest, total, output = self.largest[at], self.total[at], self.output[at]
            for block in run:
                made = _scores(some, key, block, reach, scores)
                more = torch.maximum(largest, made.amax(-1, keepdim=True))
                finite = more.masked_fill(more == float("-inf"), 0)
                made.sub_(finite).exp_()
                before = (largest - finite).exp_()
                total = total * before + made.sum(-1, keepdim=True)
                output = output * before + _product(made, wide(value[block.rows, :, block.keys]))
                largest = more
            self.largest[at], self.total[at], self.output[at] = largest, total, output

    def finish(self) -> Tensor:
        """Return (rows, heads, queries, features and 1): the output, zero for queries without keys, and behind it the
        logarithm of the sum.
        """
        output = self.output / self.total.masked_fill(self.total == 0, 1)
        return torch.cat((output, self.largest + self.total.log()), dim=-1).flatten(1, 2)


@dataclass(frozen=True, eq=False)
class Given:
    """The gradients that attention's backward begins with.

    Attributes:
        for_output: of the output, (rows, heads, queries, features), at least fp32.
        output, logarithm: what the forward returned.
        rest: (rows, heads, queries): the output times its gradient, less the logarithms' gradient.
    """

    for_output: Tensor
    output: Tensor
    logarithm: Tensor
    rest: Tensor

    @classmethod
    def of(cls, both: Tensor, gradient: Tensor) -> Given:
        """Take outputs and logarithms, one behind the other, and their gradient, apart."""
        gradient = wide(gradient)
        output, for_output = both[..., :-1], gradient[..., :-1]
        return cls(for_output, output, both[..., -1], (for_output * output).sum(-1) - gradient[..., -1])


@dataclass(frozen=True, eq=False)
class Gradients:
    """Sums of gradients, at least fp32."""

    query: Tensor
    key: Tensor
    value: Tensor


def add_gradients(
    sums: Gradients, given: Given, query: Tensor, key: Tensor, value: Tensor, reach: KeyRanges, scores: Scores
) -> None:
    """Add the gradients of attention to some keys; ``sums.key`` and ``sums.value`` are of those keys."""
    parts = scores.segments(reach, query, value)
    if parts is None:
        _add_of_blocks(sums, given, query, key, value, reach, scores)
        return
    heads = (key.shape[1], -1)
    given_query = query.unflatten(1, heads)
    for_output, output, for_query = (x.unflatten(1, heads) for x in (given.for_output, given.output, sums.query))
    logarithm = given.logarithm.unflatten(1, heads)
    for part in parts:
        at, keys = (part.rows, slice(None), slice(None), part.queries), (part.rows, slice(None), part.keys)
        found = gradients(
            for_output[at],
            wide(given_query[at]),
            wide(key[keys]),
            wide(value[keys]),
            output[at],
            logarithm[at],
            part,
            scores.scale,
        )
        for_query[at] += found[0]
        sums.key[keys] += found[1]
        sums.value[keys] += found[2]


def _add_of_blocks(
    sums: Gradients, given: Given, query: Tensor, key: Tensor, value: Tensor, reach: KeyRanges, scores: Scores
) -> None:
    heads = (key.shape[1], -1)
    query, for_output, for_query = (x.unflatten(1, heads) for x in (query, given.for_output, sums.query))
    rest, logarithm = (x.unflatten(1, heads)[..., None] for x in (given.rest, given.logarithm))
    logarithm = logarithm.masked_fill(logarithm == float("-inf"), 0)
    for run in blocks(reach):
        if not run:
            continue
        at = (run[0].rows, slice(None), slice(None), run[0].queries)
        some, for_some, rest_of_some, sum_of_some = (
            wide(query[at]) * scores.scale,
            for_output[at],
            rest[at],
            logarithm[at],
        )
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
    lower, upper = (bound[block.rows, block.queries, None] for bound in (reach.lower, reach.upper))
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
        (rows, heads, queries, features) and the logarithms (rows, heads, queries), at least fp32.
    """
    both = _BlockAttention.apply(query, key, value, reach, scores)
    return both[..., :-1], both[..., -1]


class _BlockAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, reach: KeyRanges, scores: Scores) -> Tensor:
        both = attended(lambda: _forward(query, key, value, reach, scores))
        ctx.save_for_backward(query, key, value, both)
        ctx.reach, ctx.scores = reach, scores
        return both

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, both = ctx.saved_tensors
        sums = Gradients(*(torch.zeros_like(wide(x)) for x in (query, key, value)))
        add_gradients(sums, Given.of(both, gradients[0]), query, key, value, ctx.reach, ctx.scores)
        return sums.query.to(query.dtype), sums.key.to(key.dtype), sums.value.to(value.dtype), None, None


def _forward(query: Tensor, key: Tensor, value: Tensor, reach: KeyRanges, scores: Scores) -> Tensor:
    found = Attended(query, key.shape[1], value.shape[-1])
    found.add(query, key, value, reach, scores)
    return found.finish()
