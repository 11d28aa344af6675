"""Recognise what ranks make of one process's rows: a number of times each, parts of a sum, statistics of others."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from .findings import near
from .passes import ROUNDING, Pair, Passes, factor, is_one
from .traces import Place, relative


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


def owned_tables(every: Sequence[Passes], entries: Callable[[int], list[list[Any]]]) -> list[set[str]]:
    """Name the tables of which each rank, though it has all rows of a batch, steps some rows and reads no others.

    Each row has one process's gradient on one rank and none on the others. Its parameters are one process's on a rank,
    and on the others, too, or those before the step; and no output differs in this step or the next.

    Args:
        every: the passes of each step.
        entries: a step's number -> what ranks have of gradients, of parameters before the step and after it.

    Returns the names by step.
    """

    def alike(found: Tensor, whole: Tensor) -> Tensor:
        return (found - whole).abs() <= ROUNDING["float32"] * whole.abs().max()

    owned: list[set[str]] = []
    for step, passes in enumerate(every):
        whole, own = passes.counts()
        if any(counts != whole for counts in own) or passes.first_output() is not None:
            return owned[:-1] + [set()] * (len(every) - max(step - 1, 0))
        found, stages = set[str](), []
        for stage in entries(step):
            by_name: dict[str, list[tuple[Tensor, Tensor]]] = {}
            for _, place, entry, reference in stage:
                if place == Place(place.name) and reference:
                    by_name.setdefault(place.name, []).append((entry["m"][0], reference["m"][0]))
            stages.append(by_name)
        for name in set.intersection(*map(set, stages), *owned[-1:]):
            if {len(stage[name]) for stage in stages} == {len(own)}:
                (gradients, g), (begun, b), (left, a) = (
                    (torch.stack([p[0] for p in s[name]]), s[name][0][1]) for s in stages
                )
                right, is_idle = alike(left, a), gradients == 0
                is_kept = is_idle & ((left == begun) | alike(left, b))
                is_whole = alike(gradients.sum(0), g) & right.any(0) & (right | is_kept).all(0)
                if bool((is_whole & (is_idle.sum(0) >= len(own) - 1)).all()):
                    found.add(name)
        owned.append(found)
    return owned
