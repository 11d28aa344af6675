"""Choose the rows that an evaluation reads: a run's own validation part, or a source to its last token."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np

from meshwright.core.errors import ConfigError, UnsupportedError
from meshwright.data import IGNORE_INDEX, Corpus, Prepared, SourceOptions, Split, Stream, Tokenizer
from meshwright.data.corpus.packing import Rows, check_length
from meshwright.data.images.dealing import PixelReader, open_parts
from meshwright.data.text.preference import TASK as PREFERENCE
from meshwright.distributed.process import agree
from meshwright.training.config import Config
from meshwright.training.feed import held_out_of, parts_of, prepare_once_per_node, stages_of, vision_for
from meshwright.training.views.progress import Progress, SilentProgress


@dataclass(frozen=True)
class Rowful:
    """Rows to evaluate.

    Attributes:
        name: name of their source.
        samples: number of rows, all of them read.
        source_bytes: size of the text, where all of it is read and nothing but text stands in its files.
        pixels: opens the images of a batch's rows; None where they have none.
    """

    name: str
    split: Split
    samples: int
    source_bytes: int | None = None
    pixels: PixelReader | None = None


@dataclass(frozen=True, eq=False)
class ToTheEnd:
    """The rows of a stream, the last of which is filled up with padding, so that every token is in a row."""

    stream: Stream
    rows_together: ClassVar[int] = 1

    @property
    def name(self) -> str:
        return self.stream.name

    @property
    def n_tokens(self) -> int:
        return self.stream.n_tokens

    @property
    def n_documents(self) -> int:
        return self.stream.n_documents

    def n_samples(self, seq_len: int) -> int:
        """Return the number of rows, the last one included."""
        check_length(seq_len)
        return -(-self.n_tokens // seq_len)

    def rows(self, indexes: np.ndarray, seq_len: int) -> Rows:
        """See ``Split``."""
        indexes, whole = np.asarray(indexes, dtype=np.int64).reshape(-1), self.n_tokens // seq_len
        is_last = indexes >= whole
        read = {} if is_last.all() else self.stream.rows(indexes[~is_last], seq_len)
        if not is_last.any():
            return read
        made = {}
        for key, value in self._last(seq_len).items():
            made[key] = np.repeat(value, len(indexes), axis=0)
            if read:
                made[key][~is_last] = read[key]
        return made

    def _last(self, seq_len: int) -> Rows:
        """Read the tokens behind the last whole row, as one row."""
        begin = self.n_tokens // seq_len * seq_len
        offsets = self.stream.offsets
        ends = offsets[offsets > begin] - begin
        tail = Stream(self.name, self.stream.tokens[begin:], np.concatenate([[0], ends]).astype(np.int64))
        missing = seq_len - tail.n_tokens
        fills = {"tokens": 0, "labels": IGNORE_INDEX, "positions": 0, "document_ids": -1}
        read = tail.rows(np.zeros(1, dtype=np.int64), tail.n_tokens)
        return {key: np.pad(value, ((0, 0), (0, missing)), constant_values=fills[key]) for key, value in read.items()}


def own_rows(config: Config, tokenizer: Tokenizer, limit: int | None) -> list[Rowful]:
    """Return the validation part of a run's own data (collective).

    Args:
        limit: rows in all sources together, chosen as the run's own validation does; None: all.

    Raises:
        ConfigError: the run holds nothing out.
    """
    if any(part.streaming for part in parts_of(config.data)):
        raise ConfigError("the run streamed its data, which holds nothing out: name a source with --data")
    _, corpora, pixels = _opened(config, tokenizer, config.data.validation_fraction)
    config = replace(config, validation=replace(config.validation, samples=limit or 1))
    parts = parts_of(config.data)
    held = agree.together(lambda: list(held_out_of(config, parts, corpora, stages_of(config, parts)))) or []
    if not held:
        raise ConfigError(
            f"the run holds out no row of data.seq_len = {config.data.seq_len} tokens for validation"
            f" (data.validation_fraction = {config.data.validation_fraction}): name a source with --data"
        )
    length = config.data.seq_len
    counts = [one.split.n_samples(length) if limit is None else one.samples for one in held]
    return [Rowful(one.name, one.split, count, None, pixels) for one, count in zip(held, counts, strict=True)]


def rows_of(config: Config, source: SourceOptions, tokenizer: Tokenizer, limit: int | None) -> list[Rowful]:
    """Return the rows of a source, all its tokens (collective).

    Args:
        limit: number of rows, spread evenly; None: all.
    """
    own = {name: getattr(source, name) for name in SourceOptions.__dataclass_fields__}
    config = replace(config, data=replace(config.data, mixture=(), curriculum=(), **{**own, "streaming": False}))
    (prepared,), (corpus,), pixels = _opened(config, tokenizer, 0.0)
    split = ToTheEnd(corpus.training) if isinstance(corpus.training, Stream) else corpus.training
    count = agree.together(lambda: split.n_samples(config.data.seq_len)) or 0
    is_whole = limit is None or limit >= count
    size = getattr(corpus.meta, "n_source_bytes", None) if is_whole and prepared.scan.format == "text" else None
    return [Rowful(", ".join(source.source), split, count if is_whole else int(limit or count), size, pixels)]


def _opened(
    config: Config, tokenizer: Tokenizer, fraction: float
) -> tuple[list[Prepared], list[Corpus], PixelReader | None]:
    parts = parts_of(config.data)
    config = replace(config, data=replace(config.data, validation_fraction=fraction))
    progress: Progress = SilentProgress()
    vision = vision_for(config)
    prepared = [prepare_once_per_node(config, part, tokenizer, progress, vision) for part in parts]
    opened = agree.together(lambda: open_parts(prepared, parts, vision))
    assert opened is not None
    if any(getattr(corpus.meta, "task", "") == PREFERENCE for corpus in opened[0]):
        raise UnsupportedError(
            "evaluate measures the cross entropy of text, and these records are pairs of answers (chosen and rejected):"
            " give text or conversations with --data"
        )
    return prepared, *opened
