"""Packing: a stream of documents cut into samples of equal length that know where each document begins."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from meshwright.core.errors import ConfigError

IGNORE_INDEX = -100
"""The label of a token whose successor belongs to another document; losses leave it out."""


@dataclass(frozen=True, eq=False)
class Split:
    """Documents end to end, each closed by its end-of-document token, seen as samples.

    Sample i of length s is tokens [i*s, (i+1)*s); its labels are the tokens one further on. The remainder that fills no sample
    is not used.
    """

    name: str
    """What errors call it: ``training`` or ``validation``."""
    tokens: np.ndarray
    """(tokens,), of an unsigned dtype; may be memory-mapped."""
    offsets: np.ndarray
    """int64 of shape (documents + 1,): document d is tokens [offsets[d], offsets[d + 1]); begins with 0, ends with the length."""

    @property
    def n_tokens(self) -> int:
        return len(self.tokens)

    @property
    def n_documents(self) -> int:
        return len(self.offsets) - 1

    def n_samples(self, seq_len: int) -> int:
        """How many whole samples of ``seq_len`` tokens there are, at least 1.

        Raises:
            ConfigError: ``seq_len`` below 1, or above the number of tokens.
        """
        if seq_len < 1:
            raise ConfigError(f"data.seq_len = {seq_len}: a sample has at least 1 token")
        if self.n_tokens < seq_len:
            legal = f"Legal here: seq_len from 1 to {self.n_tokens}." if self.n_tokens else "It is empty."
            more = ", or raise data.validation_fraction" if self.name == "validation" else ""
            raise ConfigError(
                f"the {self.name} split has {self.n_tokens} tokens in {self.n_documents} documents, which make no sample of"
                f" data.seq_len = {seq_len}. {legal} Lower it, add to data.source{more}"
            )
        return self.n_tokens // seq_len

    def sample(self, index: int, seq_len: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """One sample: tokens, labels, positions, document_ids; each int64 of shape (seq_len,). See ``rows``."""
        rows = self.rows(np.array([index]), seq_len)
        return rows["tokens"][0], rows["labels"][0], rows["positions"][0], rows["document_ids"][0]

    def rows(self, indexes: np.ndarray, seq_len: int) -> dict[str, np.ndarray]:
        """The samples ``indexes`` (whole numbers, shape (rows,)), as int64 arrays of shape (rows, seq_len).

        - ``tokens``
        - ``labels``: the next token; IGNORE_INDEX where that belongs to another document, or does not exist
        - ``positions``: from 0 within each document as the row shows it, so 0 again at the row's own start
        - ``document_ids``: 0 for the row's first document, one more for each that begins further on

        Raises:
            ConfigError: see ``n_samples``.
            IndexError: an index outside [0, n_samples).
        """
        n = self.n_samples(seq_len)
        indexes = np.asarray(indexes, dtype=np.int64).reshape(-1)
        if len(indexes) and not (indexes.min() >= 0 and indexes.max() < n):
            raise IndexError(f"sample {indexes.min()} to {indexes.max()} of the {self.name} split, which has samples 0 to {n - 1}")
        begins = indexes * seq_len
        places = begins[:, None] + np.arange(seq_len + 1)  # (rows, seq + 1)
        # The one place past the end is the last label of the last sample; it follows a document's end, so it is masked below.
        window = np.asarray(self.tokens)[np.minimum(places, self.n_tokens - 1)].astype(np.int64)
        starts = self._document_starts(begins, seq_len)
        within = np.arange(seq_len)
        return {
            "tokens": np.ascontiguousarray(window[:, :-1]),
            "labels": np.where(starts[:, 1:], IGNORE_INDEX, window[:, 1:]),
            "positions": within - np.maximum.accumulate(np.where(starts[:, :-1], within, 0), axis=1),
            "document_ids": np.cumsum(starts[:, :-1], axis=1, dtype=np.int64),
        }

    def _document_starts(self, begins: np.ndarray, seq_len: int) -> np.ndarray:
        """bool (rows, seq_len + 1): True where a document begins after the row's first token (the end of the stream counts as one).

        Two binary searches per row, not one per token: a corpus may have millions of documents.
        """
        low = np.searchsorted(self.offsets, begins, side="right")
        counts = np.searchsorted(self.offsets, begins + seq_len, side="right") - low
        row = np.repeat(np.arange(len(begins)), counts)
        # low[r], low[r] + 1, ... for each row r, without a loop: a running number less the number at which its row began
        which = np.arange(len(row)) + np.repeat(low - (np.cumsum(counts) - counts), counts)
        starts = np.zeros((len(begins), seq_len + 1), dtype=bool)
        starts[row, self.offsets[which] - begins[row]] = True
        return starts
