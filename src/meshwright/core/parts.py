"""Compute which slices of a tensor a rank holds where several ranks share out one dim."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

Range = tuple[int, int]
"""A range of indices: (first, one past the last)."""


@dataclass(frozen=True)
class FusedPart:
    """A run of a tensor's slices that falls into ``groups`` equal shares, in order; no rank holds part of a share.

    Attributes:
        size: number of slices.
        groups: number of shares. More ranks than shares hold copies: with two key heads on four ranks, two hold each.
    """

    size: int
    groups: int

    def fits(self, ranks: int) -> bool:
        """Return whether each of ``ranks`` can hold several whole shares, or several ranks one share each."""
        return self.groups % ranks == 0 or ranks % self.groups == 0

    def copies(self, ranks: int) -> int:
        """Count the ranks that hold each slice."""
        return max(1, ranks // self.groups)

    def range_of(self, rank: int, ranks: int) -> Range:
        """Return the range of the run's slices that one of ``ranks`` holds."""
        pieces = ranks // self.copies(ranks)
        share = self.size // pieces
        start = rank // self.copies(ranks) * share
        return start, start + share


def take(tensor: Tensor, dim: int, parts: Sequence[FusedPart], rank: int, ranks: int) -> Tensor:
    """Take one rank's share of a tensor cut along ``dim``: its runs side by side, a view where there is one run."""
    if is_plain(parts, ranks) and not parts[0].fits(ranks):  # as torch.chunk cuts
        share = -(-tensor.shape[dim] // ranks)
        start = min(rank * share, tensor.shape[dim])
        return tensor.narrow(dim, start, min(share, tensor.shape[dim] - start))
    found = [tensor.narrow(dim, low, high - low) for low, high in ranges(parts, rank, ranks)]
    if len(found) == 1:
        return found[0]
    import torch

    return torch.cat(found, dim=dim)


def is_plain(parts: Sequence[FusedPart], ranks: int) -> bool:
    """Return whether each of ``ranks`` has one run that no other has, as torch's Shard does."""
    return len(parts) == 1 and parts[0].copies(ranks) == 1


def ranges(parts: Sequence[FusedPart], rank: int, ranks: int) -> tuple[Range, ...]:
    """List the ranges that one of ``ranks`` holds of a dim that consists of ``parts``, in order."""
    found, start = [], 0
    for part in parts:
        low, high = part.range_of(rank, ranks)
        found.append((start + low, start + high))
        start += part.size
    return tuple(found)


def mixes_copies(parts: Sequence[FusedPart], ranks: int) -> bool:
    """Return whether a rank may hold, beside slices of its own, copies of slices that others hold too."""
    return len(parts) > 1 and any(part.copies(ranks) > 1 for part in parts)


@dataclass(frozen=True)
class LocalRange:
    """A range of a dim that a rank holds.

    ``copies`` ranks of the axis that shards the dim hold it, and this rank's is the ``copy``-th.
    """

    low: int
    high: int
    copy: int = 0
    copies: int = 1

    @property
    def size(self) -> int:
        return self.high - self.low


def runs_of_parts(parts: Sequence[FusedPart], rank: int, ranks: int) -> list[LocalRange]:
    """List the ranges that one of ``ranks`` holds of a dim that consists of ``parts``, each with its copies."""
    copies = [part.copies(ranks) for part in parts]
    return [
        LocalRange(low, high, rank % n, n) for (low, high), n in zip(ranges(parts, rank, ranks), copies, strict=True)
    ]


def runs_of_chunk(runs: Sequence[LocalRange], rank: int, ranks: int) -> list[LocalRange]:
    """Return chunk ``rank`` of ``ranks`` of the elements in ``runs``, as torch.chunk cuts them."""
    total = sum(run.size for run in runs)
    share = -(-total // ranks)
    first, last = min(rank * share, total), min((rank + 1) * share, total)
    found, before = [], 0
    for run in runs:
        start, stop = max(first - before, 0), min(last - before, run.size)
        if start < stop:
            found.append(replace(run, low=run.low + start, high=run.low + stop))
        before += run.size
    return found or [LocalRange(0, 0)]
