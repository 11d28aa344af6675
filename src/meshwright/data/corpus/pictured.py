"""Give conversations with images a row each, and pairs of a better and a worse answer rows side by side."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar

import numpy as np

from meshwright.core.errors import UnsupportedError

from .arrays import NO_PICTURES, PictureList
from .packing import Corpus, Rows, Split, Whole

# --- give conversations with images a row each

IMAGES = "images"
"""The key of rows that holds a tuple of ``ImageFile`` for each row; an object array of shape (rows,)."""


@dataclass(frozen=True, eq=False)
class Pictured(Whole):
    """A split of documents with images, each in a row of its own, followed by padding.

    Models that take images keep packed documents apart in no common way, and count positions by images.
    A document that is cut short is cut before an image that would not be whole.
    """

    images: PictureList = NO_PICTURES

    def rows(self, indexes: np.ndarray, seq_len: int) -> Rows:
        """See ``Split``; with ``images``, the files of each row's images in order."""
        found = super().rows(indexes, seq_len)
        members, _ = self._bins(seq_len)
        files = np.empty(len(found["tokens"]), dtype=object)
        for row, document in enumerate(members[np.asarray(indexes).reshape(-1)].tolist()):
            kept = self.kept_lengths(seq_len)[document]
            places = self.images.of(document)
            files[row] = tuple(self.images.file(number) for number in places[places[:, 2] <= kept, 3].tolist())
        return found | {IMAGES: files}

    def _cut(self, document: int, seq_len: int) -> int:
        places = self.images.of(document)[:, 1:3].tolist()
        return next((begin for begin, end in places if begin < seq_len < end), seq_len)

    def _bins(self, seq_len: int) -> tuple[np.ndarray, np.ndarray]:
        if seq_len not in self._packed:
            documents = np.flatnonzero(self.kept_lengths(seq_len))
            self._packed[seq_len] = documents, np.arange(len(documents) + 1)
        return self._packed[seq_len]


def beside_images(corpora: Sequence[Corpus], names: Sequence[str]) -> list[Corpus]:
    """Return the parts of a mixture; where one has images, with each conversation of the others in a row of its own.

    Raises:
        UnsupportedError: another part is plain text, which is packed into rows.
    """
    if not any(isinstance(corpus.training, Pictured) for corpus in corpora):
        return list(corpora)
    for corpus, name in zip(corpora, names, strict=True):
        if not isinstance(corpus.training, Whole):
            raise UnsupportedError(
                f"the part '{name}' of data.mixture is plain text, of which a row packs several documents, and other"
                f" parts have images, with one conversation a row: leave it out, or write it as conversations"
            )
    return [replace(c, training=_alone(c.training), validation=_alone(c.validation)) for c in corpora]


def _alone(split: Split) -> Split:
    """Return a split of whole documents with each in a row of its own."""
    if isinstance(split, Pictured) or not isinstance(split, Whole):
        return split
    return Pictured(split.name, split.tokens, split.offsets, split.is_learnt, split.too_long, split.padding)


# --- give pairs of a better and a worse answer rows of their own, side by side


@dataclass(frozen=True, eq=False)
class Pairs(Whole):
    """A split of documents of which each two are a pair: samples 2i and 2i + 1 are the better and the worse answer.

    Each is a row of its own, followed by padding. A pair with an answer that is longer than a sample meets
    ``too_long`` as a whole, and one of which an answer would be cut away is left out.
    """

    rows_together: ClassVar[int] = 2
    _reference: dict[int, np.ndarray] = field(default_factory=dict, repr=False)

    def set_reference(self, seq_len: int, log_probs: np.ndarray) -> None:
        """Give each sample of a length its log-probability under a reference, which ``rows`` returns with it."""
        self._reference[seq_len] = log_probs

    def rows(self, indexes: np.ndarray, seq_len: int) -> Rows:
        """See ``Split``; with ``reference_log_probs``, float64 of shape (rows,), once there is a reference."""
        found = super().rows(indexes, seq_len)
        if seq_len in self._reference:
            found["reference_log_probs"] = self._reference[seq_len][np.asarray(indexes).reshape(-1)]
        return found

    def n_unlearnt(self, seq_len: int) -> int:
        """Return the number of answers that are left out since one of their pair is cut away."""
        return 0 if self.too_long == "skip" else self.n_documents - len(self._bins(seq_len)[0])

    def _bins(self, seq_len: int) -> tuple[np.ndarray, np.ndarray]:
        if seq_len not in self._packed:
            fits = (self.kept_lengths(seq_len) > 0).reshape(-1, 2).all(1)
            documents = np.flatnonzero(np.repeat(fits, 2))
            self._packed[seq_len] = documents, np.arange(len(documents) + 1)
        return self._packed[seq_len]
