"""Compute the loss of rows over all their tokens, however ranks and batches deal them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from meshwright.data import IGNORE_INDEX, Tokenizer, validation_batches
from meshwright.data.row_ends import RowEnds
from meshwright.data.text.tokenizers import ByteTokenizer
from meshwright.distributed.mesh import data_position
from meshwright.distributed.parallel_model import ParallelModel
from meshwright.distributed.process import agree

from .rows import Rowful

ROWS = 8
"""Rows per forward of a data rank, by default."""


@dataclass(frozen=True)
class Evaluation:
    """The loss of a model on text.

    Attributes:
        loss: mean over all ``tokens`` that are predicted, in nats.
        rows: number of rows with these tokens.
        bytes: size of the predicted text; None where it is not known.
    """

    loss: float
    tokens: int
    rows: int
    bytes: int | None = None

    @property
    def perplexity(self) -> float:
        """e to the loss; infinite where that exceeds every float."""
        return math.exp(self.loss) if self.loss < 700 else math.inf

    @property
    def bits_per_byte(self) -> float | None:
        """All losses in bits, for each byte of the text."""
        return self.loss * self.tokens / math.log(2) / self.bytes if self.bytes else None


def evaluate_rows(
    model: ParallelModel, chosen: Sequence[Rowful], seq_len: int, tokenizer: Tokenizer, batch_rows: int = ROWS
) -> Evaluation:
    """Evaluate a model on rows (collective): each batch's mean counts by its tokens, and padding not at all.

    Args:
        batch_rows: rows per forward of a data rank.
    """
    model.learn_documents()
    place, ends = data_position(model.mesh), RowEnds.of(model.plan, 0)
    total, tokens, weight, counted = 0.0, 0, 0.0, 0
    with model.averaged():
        for part in chosen:
            chosen_rows = part.split, seq_len, part.samples, batch_rows
            for batch in validation_batches(*chosen_rows, *place, part.pixels, ends):
                loss = model.evaluate(batch)
                total += float(loss) * loss.weight
                weight += loss.weight
                tokens += loss.tokens
                counted += _bytes_of(batch["labels"], tokenizer)
    of_data_ranks = dict(agree.everybody_says((place[0], counted)))
    size = sum(of_data_ranks.values()) if isinstance(tokenizer, ByteTokenizer) else _size_of(chosen)
    return Evaluation(total / weight if weight else math.nan, tokens, sum(part.samples for part in chosen), size)


def _bytes_of(labels: torch.Tensor, tokenizer: Tokenizer) -> int:
    """Count the labels that are bytes of the text, where a token is a byte."""
    is_byte = (labels != IGNORE_INDEX) & (labels != tokenizer.end_of_document)
    return int(is_byte.sum()) if isinstance(tokenizer, ByteTokenizer) else 0


def _size_of(chosen: Sequence[Rowful]) -> int | None:
    sizes = [part.source_bytes for part in chosen]
    return None if None in sizes else sum(size for size in sizes if size is not None)
