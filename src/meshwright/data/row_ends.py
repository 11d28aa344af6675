"""End the rows of a microbatch where the longest of them ends, so that no rank computes padding that nobody needs."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from meshwright.data.corpus.packing import Whole
from meshwright.planning.plan import Plan

from .corpus.packing import Rows, Split

MULTIPLE = 16
"""Tokens that a row's length is a multiple of: matrix units work in tiles, and allocators like few shapes."""


@dataclass(frozen=True)
class RowEnds:
    """Where rows end: lengths follow from the samples' indexes alone, so all ranks know them without messages.

    Attributes:
        microbatch: rows of a microbatch, which has a length of its own; 0: all rows of a step have one length.
        multiple: a length is a multiple of this, unless it is that of a whole sample.
        is_fixed: all lengths are that of the longest row of the data, as compiled graphs want it.
    """

    microbatch: int = 0
    multiple: int = 1
    is_fixed: bool = False

    @classmethod
    def of(cls, plan: Plan, microbatch: int, *, is_fixed: bool = False) -> RowEnds:
        """Return where rows end on a layout: context ranks take two runs of a row each, and tensor ranks a part.

        A pipeline's microbatches have one length; compiled blocks have one for a whole run.
        """
        multiple = math.lcm(MULTIPLE, 2 * plan.size("cp") * plan.size("tp"))
        return cls(0 if plan.pipeline is not None else microbatch, multiple, is_fixed or bool(plan.compiled))

    def length(self, splits: Iterable[Split], found: np.ndarray, seq_len: int) -> int:
        """Return the length of rows that have ``found`` tokens (integers), of these splits (none: a stream)."""
        if self.is_fixed:
            found = np.array([row_lengths(split, seq_len).max() for split in splits] or [seq_len])
        return min(-(-int(found.max()) // self.multiple) * self.multiple, seq_len)


def row_lengths(split: Split, seq_len: int) -> np.ndarray:
    """Return how many tokens each sample of a split has before its padding begins, or the same for all: int64."""
    return split.row_lengths(seq_len) if isinstance(split, Whole) else np.array([seq_len])


def lengths_at(split: Split, indexes: np.ndarray, seq_len: int) -> np.ndarray:
    """Return the lengths of the samples at ``indexes``."""
    lengths = row_lengths(split, seq_len)
    return lengths[indexes] if len(lengths) > 1 else np.broadcast_to(lengths, indexes.shape)


def ended(rows: Rows, length: int) -> Rows:
    """Return rows that end after ``length`` tokens."""
    return {key: values[:, :length] if values.ndim > 1 else values for key, values in rows.items()}
