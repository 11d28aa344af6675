"""Give pairs of a better and a worse answer rows of their own, side by side."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np

from .packing import Rows
from .whole import Whole


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
