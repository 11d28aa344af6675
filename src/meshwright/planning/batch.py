"""Describe the shape of one optimizer step's data."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Batch:
    """The shape of one optimizer step's data.

    Attributes:
        global_rows: sequences per optimizer step over all ranks.
        seq_len: tokens per sequence.
        microbatch_rows: sequences per forward on one rank; 0: the rank's whole share.
        vocab_size: number of token ids that the data may hold; 0: unknown.
    """

    global_rows: int
    seq_len: int
    microbatch_rows: int = 0
    vocab_size: int = 0

    def microbatches(self, data_ranks: int) -> int:
        """Return the number of forward passes per step on each of ``data_ranks`` ranks."""
        rows = self.global_rows // data_ranks
        return -(-rows // self.microbatch_rows) if self.microbatch_rows else 1
