"""Pack whole documents into samples, since a prompt cut off from its answer teaches nothing."""

from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import dataclass, field
from functools import cached_property
from typing import ClassVar, Literal

import numpy as np

from meshwright.core.errors import ConfigError
from meshwright.core.losses import PADDING

from .packing import IGNORE_INDEX, Rows, check_length, checked, number_documents


@dataclass(frozen=True, eq=False)
class Whole:
    """A split of whole documents: each sample holds one or more of them, followed by padding.

    Best-fit decreasing (Johnson 1974; for training: Ding et al. 2024, "Fewer truncations improve language modeling")
    decides which documents share a sample, from their lengths alone. A document's loss does not depend on its
    neighbours: documents do not attend to each other, positions begin at 0, and padding has no labels.
    """

    name: str
    tokens: np.ndarray
    """Ids of shape (tokens,) and an integer dtype."""
    offsets: np.ndarray
    """int64 of shape (documents + 1,): where each document begins, and the number of tokens."""
    is_learnt: np.ndarray
    """uint8 of shape (tokens,): 1 where the token is to be predicted, 0 where it is only context."""
    too_long: Literal["refuse", "truncate", "skip"] = "refuse"
    padding: int = 0
    """The id that fills a sample after its last document."""
    rows_together: ClassVar[int] = 1
    _packed: dict[int, tuple[np.ndarray, np.ndarray]] = field(default_factory=dict, repr=False)
    _row_lengths: dict[int, np.ndarray] = field(default_factory=dict, repr=False)
    _kept_lengths: dict[int, np.ndarray] = field(default_factory=dict, repr=False)

    @property
    def n_tokens(self) -> int:
        return len(self.tokens)

    @property
    def n_documents(self) -> int:
        return len(self.offsets) - 1

    @cached_property
    def lengths(self) -> np.ndarray:
        """The number of tokens in each document."""
        return np.diff(self.offsets)

    def n_too_long(self, seq_len: int) -> int:
        """Return the number of documents longer than a sample."""
        return int((self.lengths > seq_len).sum())

    def n_unlearnt(self, seq_len: int) -> int:
        """Return the number of documents that are left out since nothing of what fits a sample is learnt."""
        return 0 if self.too_long == "skip" else int((self.kept_lengths(seq_len) == 0).sum())

    def n_samples(self, seq_len: int) -> int:
        """Return the number of samples (see ``Split``).

        Raises ConfigError also where a document does not fit and ``too_long`` is ``refuse``.
        """
        check_length(seq_len)
        n_long = self.n_too_long(seq_len)
        if n_long and self.too_long == "refuse":
            raise ConfigError(
                f"{n_long} of the {self.n_documents} conversations of the {self.name} split are longer than"
                f" data.seq_len = {seq_len} (the longest has {self.lengths.max()} tokens). Raise data.seq_len, or set"
                f" data.too_long = 'truncate' or 'skip'"
            )
        n = len(self._bins(seq_len)[1]) - 1
        if not n:
            raise ConfigError(
                f"the {self.name} split has {self.n_documents} conversations and none of which data.seq_len = {seq_len}"
                f" tokens hold anything to learn: raise it"
            )
        return n

    def rows(self, indexes: np.ndarray, seq_len: int) -> Rows:
        """See ``Split``."""
        indexes = checked(indexes, self.n_samples(seq_len), self.name)
        members, bounds = self._bins(seq_len)
        tokens, labels, documents, positions = np.empty((4, len(indexes), seq_len), dtype=np.int64)
        tokens.fill(self.padding)
        learnt = np.zeros((len(indexes), seq_len), dtype=np.uint8)
        row_of, starts, ends = [], [], []
        for row, index in enumerate(indexes.tolist()):
            at = 0
            chosen = members[bounds[index] : bounds[index + 1]]
            kept = self.kept_lengths(seq_len)[chosen]
            for n, begin in zip(kept.tolist(), self.offsets[chosen].tolist(), strict=True):
                if not n:
                    continue
                tokens[row, at : at + n] = self.tokens[begin : begin + n]
                learnt[row, at : at + n - 1] = self.is_learnt[begin + 1 : begin + n]
                at += n
                if at < seq_len:  # the next document, or the padding, a document of its own that nothing attends to
                    row_of.append(row)
                    starts.append(at)
            ends.append(at)
        labels[:, :-1] = tokens[:, 1:]
        labels[learnt == 0] = IGNORE_INDEX
        number_documents(np.array(row_of, dtype=np.int64), np.array(starts, dtype=np.int64), documents, positions)
        documents[np.arange(seq_len) >= np.array(ends)[:, None]] = PADDING
        return {"tokens": tokens, "labels": labels, "positions": positions, "document_ids": documents}

    def row_lengths(self, seq_len: int) -> np.ndarray:
        """Return the most tokens that each sample holds before its padding: int64 of shape (samples,)."""
        if seq_len not in self._row_lengths:
            members, bounds = self._bins(seq_len)
            kept = self.kept_lengths(seq_len)[members]
            self._row_lengths[seq_len] = np.add.reduceat(kept, bounds[:-1])
        return self._row_lengths[seq_len]

    def kept_lengths(self, seq_len: int) -> np.ndarray:
        """Return the number of each document's tokens that its sample holds; 0: it is in none.

        A document that is cut off before anything that is learnt is left out.
        """
        if seq_len not in self._kept_lengths:
            kept = np.minimum(self.lengths, seq_len)
            for document in np.flatnonzero(self.lengths > seq_len).tolist():
                begin = int(self.offsets[document])
                n = 0 if self.too_long == "skip" else self._cut(document, seq_len)
                kept[document] = n if self.is_learnt[begin + 1 : begin + n].any() else 0
            self._kept_lengths[seq_len] = kept
        return self._kept_lengths[seq_len]

    def _cut(self, document: int, seq_len: int) -> int:
        """Return the number of tokens after which a document that is longer than a sample is cut."""
        return seq_len

    def _bins(self, seq_len: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the documents in the order of the samples, and the offset of each sample among them."""
        if seq_len not in self._packed:
            self._packed[seq_len] = best_fit(self.kept_lengths(seq_len), seq_len)
        return self._packed[seq_len]


def best_fit(lengths: np.ndarray, capacity: int) -> tuple[np.ndarray, np.ndarray]:
    """Pack items into bins by best-fit decreasing: each item, longest first, into the fullest bin that can hold it.

    Args:
        lengths: integers of shape (items,); an item of length 0 goes into no bin.
        capacity: size of a bin, at least the longest item.

    Returns:
        The items in the order of their bins, and the offset of each bin among them (with their number at the end);
        int64.
    """
    order = np.argsort(-lengths, kind="stable")
    rooms: list[int] = []  # the distinct remaining capacities of the bins, sorted
    bins_with: dict[int, list[int]] = {}
    members: list[list[int]] = []
    for item in order.tolist():
        length = int(lengths[item])
        if not length:
            break
        i = bisect_left(rooms, length)
        if i < len(rooms):
            room = rooms[i]
            number = bins_with[room].pop()
            if not bins_with[room]:
                del bins_with[room], rooms[i]
        else:
            room, number = capacity, len(members)
            members.append([])
        members[number].append(item)
        left = room - length
        if left:
            if left not in bins_with:
                insort(rooms, left)
            bins_with.setdefault(left, []).append(number)
    bounds = np.cumsum([0, *map(len, members)], dtype=np.int64)
    return np.array([item for bin_ in members for item in bin_], dtype=np.int64), bounds
