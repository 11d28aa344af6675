"""Recognise what ranks make of one process's rows: a number of times each, parts of a sum, statistics of others."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .findings import near
from .passes import Pair, Passes, factor, is_one
from .traces import relative


def of_rows(passes: Passes, off: list[Pair], every: list[Pair]) -> tuple[str, str] | None:
    """Recognise what one number, a sum, or another order makes of one process's rows."""
    factors, n = [factor(pair.found, pair.whole) for pair in off], len(passes.own)
    if not off:
        return None
    if is_one(factors):
        return ("double reduction" if near(factors[0], n) else "wrong scale"), f"{factors[0]:.6g} times"
    by_rank = [[f for f, pair in zip(factors, off, strict=True) if pair.rank == rank] for rank in range(n)]
    scales = [{f and round(f, 2) for f in some} for some in by_rank]  # several, where a step calls the module again
    if n > 1 and all(
        None not in own and 0 < 2 * len(own) <= len(some) for own, some in zip(scales, by_rank, strict=True)
    ):
        return "missing reduction", "each rank has a scale of its own"
    if n > 1 and passes.add_up([pair for pair in every if pair.row in {p.row for p in off}]):
        return "missing reduction", "each rank has its own part of the sum"
    if (kind := _of_statistics(off)) is not None:
        return kind, "right but for a scale and a shift of each feature: statistics of other rows"
    if all(pair.is_permuted for pair in off):
        return "wrong order", "the same numbers in another order"
    return None


def of_shares(scales: Sequence[float | None], n: int) -> tuple[str, str]:
    """Say what it tells that rows of ``n`` ranks count by other shares of the loss: a batch's have theirs in common."""
    apart: list[float | None] = []
    for scale in scales:
        if scale is None or not any(other is not None and abs(scale - other) < 1e-2 * abs(other) for other in apart):
            apart.append(scale)
    if len(scales) <= n or 2 * len(apart) <= len(scales):
        return "wrong scale", "rows count by other shares of the loss"
    return "missing reduction", "each row counts by a share of its own: losses depend on other rows"


def _of_statistics(off: list[Pair]) -> str | None:
    """Recognise outputs that differ by a scale and a shift of each feature, alike for all rows of a rank."""
    lines = []
    for rank in sorted({pair.rank for pair in off}):
        found, whole = ([getattr(p, key) for p in off if p.rank == rank] for key in ("found", "whole"))
        if len(found) < 3 or len({len(row) for row in (*found, *whole)}) > 1:
            return None
        (y, y_mean), (x, x_mean) = ((m - m.mean(0), m.mean(0)) for m in map(torch.stack, (found, whole)))
        slope = (x * y).sum(0) / (x * x).sum(0).clamp(min=1e-12)
        if relative(slope * x, y) > 1e-3:
            return None
        lines.append(torch.cat([slope, y_mean - slope * x_mean]))
    alike = max((sum(relative(line, other) < 1e-3 for other in lines) for line in lines), default=0)
    return "wrong group" if 1 < alike < len(lines) else "missing reduction" if alike == 1 else None
