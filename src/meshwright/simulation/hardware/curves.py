"""Interpolate measured seconds: along one size, or over the three dims of a product."""

from __future__ import annotations

import math
from bisect import bisect_right
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise, product


def _between(low: float, high: float, share: float) -> float:
    """Return the value between two positive ones on a logarithmic scale."""
    return math.exp((1 - share) * math.log(low) + share * math.log(high))


@dataclass(frozen=True)
class SecondsCurve:
    """Seconds by a size (bytes, elements, tokens), measured at ascending sizes.

    Below the first size the seconds are those of the first; beyond the last they grow with ``power`` of the size.
    """

    points: tuple[tuple[float, float], ...]
    power: float = 1.0

    @cached_property
    def _sizes(self) -> list[float]:
        return [size for size, _ in self.points]

    def seconds(self, size: float) -> float:
        """Return the seconds at a size, between two measured ones on a logarithmic scale of both."""
        first, last = self.points[0], self.points[-1]
        if size <= first[0]:
            return first[1]
        if size >= last[0]:
            return last[1] * (size / last[0]) ** self.power
        above = bisect_right(self._sizes, size)
        (low, before), (high, after) = self.points[above - 1], self.points[above]
        return _between(before, after, math.log(size / low) / math.log(high / low))

    @property
    def least(self) -> float:
        """The seconds at the smallest size, which are those of the call itself."""
        return self.points[0][1]


@dataclass(frozen=True)
class ProductGrid:
    """Seconds of products (rows, depth) x (depth, columns) at all triples of some dims.

    Attributes:
        dims: ascending dims that each of rows, columns and depth has.
        seconds: by rows, then columns, then depth.
    """

    dims: tuple[int, ...]
    seconds: tuple[float, ...]

    @cached_property
    def _speeds(self) -> dict[tuple[int, int, int], float]:
        """FLOP/s at places on the grid."""
        every = range(len(self.dims))
        triples = product(every, every, every)
        return {
            (a, b, c): 2.0 * self.dims[a] * self.dims[b] * self.dims[c] / seconds
            for (a, b, c), seconds in zip(triples, self.seconds, strict=True)
        }

    @cached_property
    def fastest(self) -> float:
        """The most FLOP/s of all shapes."""
        return max(self._speeds.values())

    def product_s(self, rows: float, columns: float, depth: float) -> float:
        """Return the seconds of a product, at the FLOP/s between the shapes around it.

        Outside the grid a dim counts as the nearest one that was measured; a product is never faster than the smallest.
        """
        if min(rows, columns, depth) <= 0:
            return 0.0
        around = (self._around(dim) for dim in (rows, columns, depth))
        logarithm = sum(
            wa * wb * wc * math.log(self._speeds[a, b, c]) for (a, wa), (b, wb), (c, wc) in product(*around)
        )
        return max(2.0 * rows * columns * depth / math.exp(logarithm), self.seconds[0])

    def _around(self, dim: float) -> list[tuple[int, float]]:
        """Return the places around a dim, with their weights."""
        dims = self.dims
        if dim <= dims[0] or len(dims) == 1:
            return [(0, 1.0)]
        for place, (low, high) in enumerate(pairwise(dims)):
            if dim <= high:
                share = math.log(dim / low) / math.log(high / low)
                return [(place, 1 - share), (place + 1, share)]
        return [(len(dims) - 1, 1.0)]
