"""Pack documents into samples of equal length, one behind the other or whole, and end rows where the longest ends."""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol

import numpy as np

from meshwright.core.errors import ConfigError
from meshwright.core.losses import PADDING

if TYPE_CHECKING:
    from meshwright.planning.plan import Plan

# --- pack documents into samples of equal length that record where each document begins

IGNORE_INDEX = -100
"""Label without a loss: the next token belongs to another document, is part of a prompt, or is padding."""

Rows = dict[str, np.ndarray]
"""int64 arrays of shape (rows, seq_len):

- ``tokens``
- ``labels``: the next token, or IGNORE_INDEX
- ``positions``: counted from 0 within the part of each document that is in the row, so every row begins with 0
- ``document_ids``: 0 for the row's first document, 1 for the next, and so on; -1 for padding
"""


class Split(Protocol):
    """A set of samples with random access."""

    rows_together: ClassVar[int]
    """The number of successive samples that stay side by side in every order: 2 for pairs, else 1."""

    @property
    def name(self) -> str:
        """The split's name in error messages, like ``training``."""
        ...

    @property
    def n_tokens(self) -> int: ...

    @property
    def n_documents(self) -> int: ...

    def n_samples(self, seq_len: int) -> int:
        """Return the number of samples of ``seq_len`` tokens, at least 1.

        Raises:
            ConfigError: there is no sample, or ``seq_len`` is below 1.
        """
        ...

    def rows(self, indexes: np.ndarray, seq_len: int) -> Rows:
        """Read the samples at ``indexes`` (integers, shape (rows,)).

        Raises:
            ConfigError: see ``n_samples``.
            IndexError: an index is outside [0, n_samples).
        """
        ...


@dataclass(frozen=True, eq=False)
class Corpus:
    """An opened corpus: two splits over memory-mapped arrays."""

    meta: Any
    training: Split
    validation: Split
    """May be empty, with no documents and no tokens."""


@dataclass(frozen=True, eq=False)
class Stream:
    """Concatenated documents, each closed by its end-of-document token, cut into samples.

    Sample i of length s is tokens [i*s, (i+1)*s); its labels are the tokens shifted by one. The remainder, shorter
    than a sample, is not used.
    """

    name: str
    tokens: np.ndarray
    """Ids of shape (tokens,) and an integer dtype; may be memory-mapped."""
    offsets: np.ndarray
    """int64 of shape (documents + 1,): document d is tokens [offsets[d], offsets[d + 1]); from 0 to len(tokens)."""
    rows_together: ClassVar[int] = 1

    @property
    def n_tokens(self) -> int:
        return len(self.tokens)

    @property
    def n_documents(self) -> int:
        return len(self.offsets) - 1

    def n_samples(self, seq_len: int) -> int:
        """Return the number of whole samples; see ``Split``."""
        check_length(seq_len)
        if not (n := self.n_rows(seq_len)):
            legal = f"Legal here: seq_len from 1 to {self.n_tokens}." if self.n_tokens else "It is empty."
            more = ", or raise data.validation_fraction" if self.name == "validation" else ""
            raise ConfigError(
                f"the {self.name} split has {self.n_tokens} tokens in {self.n_documents} documents, which make no"
                f" sample of data.seq_len = {seq_len}. {legal} Lower it, add to data.source{more}"
            )
        return n

    def n_rows(self, seq_len: int) -> int:
        """Return the number of samples, also where there are none."""
        return self.n_tokens // seq_len

    def rows(self, indexes: np.ndarray, seq_len: int) -> Rows:
        """See ``Split``."""
        begins = checked(indexes, self.n_samples(seq_len), self.name) * seq_len
        tokens, labels, documents, positions = np.empty((4, len(begins), seq_len), dtype=np.int64)
        for row, begin in enumerate(begins.tolist()):
            tokens[row] = self.tokens[begin : begin + seq_len]
            ahead = self.tokens[begin + 1 : begin + 1 + seq_len]
            labels[row, : len(ahead)] = ahead  # the very last label, if missing, follows a document's end: masked below
        low = np.searchsorted(self.offsets, begins, side="right")
        counts = np.searchsorted(self.offsets, begins + seq_len, side="right") - low
        row = np.repeat(np.arange(len(low)), counts)
        which = np.arange(len(row)) + np.repeat(low - (np.cumsum(counts) - counts), counts)  # the documents of each
        starts = self.offsets[which] - begins[row]  # a document's start within its row, from 1 to seq_len
        labels[row, starts - 1] = IGNORE_INDEX
        inside = starts < seq_len
        number_documents(row[inside], starts[inside], documents, positions)
        return {"tokens": tokens, "labels": labels, "positions": positions, "document_ids": documents}


@dataclass(frozen=True, eq=False)
class Joined:
    """A concatenation of splits, such as the files of a corpus used in place; no sample spans two of them."""

    name: str
    parts: Sequence[Stream]
    rows_together: ClassVar[int] = 1

    @property
    def n_tokens(self) -> int:
        return sum(part.n_tokens for part in self.parts)

    @property
    def n_documents(self) -> int:
        return sum(part.n_documents for part in self.parts)

    def n_samples(self, seq_len: int) -> int:
        """Return the number of samples (see ``Split``); a part shorter than a sample has none."""
        check_length(seq_len)
        n = int(self._bounds(seq_len)[-1])
        if not n:
            raise ConfigError(
                f"the {self.name} split has {self.n_tokens} tokens in {len(self.parts)} files, none of them of"
                f" data.seq_len = {seq_len} tokens: lower it"
            )
        return n

    def rows(self, indexes: np.ndarray, seq_len: int) -> Rows:
        """See ``Split``."""
        indexes = checked(indexes, self.n_samples(seq_len), self.name)
        bounds = self._bounds(seq_len)
        which = np.searchsorted(bounds, indexes, side="right") - 1
        return gather(self.parts, which, indexes - bounds[which], seq_len)

    def _bounds(self, seq_len: int) -> np.ndarray:
        return np.cumsum([0, *(part.n_rows(seq_len) for part in self.parts)], dtype=np.int64)


def gather(splits: Sequence[Split], which: np.ndarray, indexes: np.ndarray, seq_len: int) -> Rows:
    """Assemble one batch from several splits: each row is the sample ``indexes`` of the split ``which``, (rows,)."""
    used = sorted(set(which.tolist()))
    if len(used) == 1:
        return splits[used[0]].rows(indexes, seq_len)
    batch: Rows = {}
    for k in used:
        mine = which == k
        for key, value in splits[k].rows(indexes[mine], seq_len).items():
            batch.setdefault(key, np.empty((len(which), *value.shape[1:]), dtype=value.dtype))[mine] = value
    return batch


def check_length(seq_len: int) -> None:
    if seq_len < 1:
        raise ConfigError(f"data.seq_len = {seq_len}: a sample has at least 1 token")


def checked(indexes: np.ndarray, n: int, name: str) -> np.ndarray:
    indexes = np.asarray(indexes, dtype=np.int64).reshape(-1)
    if len(indexes) and not (indexes.min() >= 0 and indexes.max() < n):
        raise IndexError(
            f"sample {indexes.min()} to {indexes.max()} of the {name} split, which has samples 0 to {n - 1}"
        )
    return indexes


def number_documents(row: np.ndarray, starts: np.ndarray, documents: np.ndarray, positions: np.ndarray) -> None:
    """Fill in document ids and positions, in place.

    Documents after a row's first begin at ``starts`` (from 1 to seq_len - 1, ascending in a row). Ids and positions
    are running sums computed in place: a fresh array of this size costs more in page faults than in arithmetic.
    """
    documents.fill(0)
    documents[row, starts] = 1
    np.cumsum(documents, axis=1, out=documents)
    positions.fill(1)
    positions[:, 0] = 0
    is_first = np.diff(row, prepend=-1) != 0
    before = np.where(is_first, 0, np.roll(starts, 1))  # start of the document that ends at ``starts``
    positions[row, starts] = 1 - (starts - before)
    np.cumsum(positions, axis=1, out=positions)


# --- pack whole documents into samples, since a prompt cut off from its answer teaches nothing


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

    def n_kept(self, seq_len: int) -> tuple[int, int]:
        """Return the tokens of what fits a sample, and those of them that are learnt."""
        kept = self.kept_lengths(seq_len)
        learnt = np.concatenate([[0], np.cumsum(self.is_learnt, dtype=np.int64)])
        begins = self.offsets[:-1]
        return int(kept.sum()), int((learnt[begins + kept] - learnt[begins]).sum())

    def n_samples(self, seq_len: int) -> int:
        """Return the number of samples (see ``Split``).

        Raises ConfigError also where a document does not fit and ``too_long`` is ``refuse``.
        """
        check_length(seq_len)
        n_long = self.n_too_long(seq_len)
        if n_long and self.too_long == "refuse":
            raise ConfigError(
                f"{n_long} of the {self.n_documents} conversations of the {self.name} split"
                f" {are_longer(n_long, seq_len)} (the longest has {self.lengths.max()} tokens). Set"
                f" data.too_long = 'truncate' or 'skip', or a higher data.seq_len where the model takes as many"
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
            self._packed[seq_len] = self.pack(seq_len)
        return self._packed[seq_len]

    def pack(self, seq_len: int) -> tuple[np.ndarray, np.ndarray]:
        return best_fit(self.kept_lengths(seq_len), seq_len)


def are_longer(n: int, seq_len: int) -> str:
    """Return the predicate of ``n`` documents that do not fit."""
    return f"{'is' if n == 1 else 'are'} longer than data.seq_len = {seq_len}"


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
