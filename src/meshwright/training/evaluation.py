"""Evaluate a trained model on text, on any layout."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import numpy as np

from meshwright.checkpoint.store import Location
from meshwright.core.config import is_unset
from meshwright.core.errors import ConfigError, UnsupportedError
from meshwright.data import IGNORE_INDEX, Corpus, Prepared, SourceOptions, Stream, Tokenizer, validation_batches
from meshwright.data.cache import open_parts
from meshwright.data.images import PixelReader
from meshwright.data.packing import Joined, RowEnds, Rows, Whole
from meshwright.data.tasks import TASK as PREFERENCE
from meshwright.data.tokenizers import ByteTokenizer
from meshwright.distributed.mesh import data_position
from meshwright.distributed.parallel_model import ParallelModel
from meshwright.distributed.process import agree
from meshwright.distributed.process.workers import WorkerFailed, WorkerPool
from meshwright.distributed.process.world import get_world_info
from meshwright.distributed.setup import DistributedConfig
from meshwright.planning.layout import Layout
from meshwright.training.config import Config, ProcessConfig
from meshwright.training.feed import HeldOut, held_out_of, parts_of, prepare_once_per_node, stages_of, vision_for
from meshwright.training.fine_tuning import LONGEST_ROW
from meshwright.training.launch import for_the_user, usual_processes
from meshwright.training.run.opened import Opened
from meshwright.training.run.request import read_request
from meshwright.training.views.progress import Progress

# --- choose the rows that an evaluation reads


class ToTheEnd(Stream):
    """A stream whose last row is filled up with padding, so that every token is in a row."""

    def n_rows(self, seq_len: int) -> int:
        """Return the number of rows, the last one included."""
        return -(-self.n_tokens // seq_len)

    def rows(self, indexes: np.ndarray, seq_len: int) -> Rows:
        """See ``Split``."""
        indexes, whole = np.asarray(indexes, dtype=np.int64).reshape(-1), self.n_tokens // seq_len
        is_last = indexes >= whole
        read = {} if is_last.all() else super().rows(indexes[~is_last], seq_len)
        if not is_last.any():
            return read
        begin, made = whole * seq_len, {}  # the tokens behind the last whole row, as one row
        ends = np.concatenate([[0], self.offsets[self.offsets > begin] - begin]).astype(np.int64)
        tail = Stream(self.name, self.tokens[begin:], ends)
        fills = {"tokens": 0, "labels": IGNORE_INDEX, "positions": 0, "document_ids": -1}
        for key, value in tail.rows(np.zeros(1, dtype=np.int64), tail.n_tokens).items():
            value = np.pad(value, ((0, 0), (0, seq_len - tail.n_tokens)), constant_values=fills[key])
            made[key] = np.repeat(value, len(indexes), axis=0)
            if read:
                made[key][~is_last] = read[key]
        return made


def own_rows(config: Config, tokenizer: Tokenizer, limit: int | None) -> list[HeldOut]:
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
    parts, rows = parts_of(config.data), config.steps * config.batch.global_batch
    held = agree.together(lambda: list(held_out_of(config, parts, corpora, stages_of(config, parts), rows))) or []
    if not held:
        raise ConfigError(
            f"no source that the run ends with holds out a row of data.seq_len = {config.data.seq_len} tokens"
            f" (data.validation_fraction = {config.data.validation_fraction}): name a source with --data"
        )
    length = config.data.seq_len
    counts = [one.split.n_samples(length) if limit is None else one.samples for one in held]
    return [replace(one, samples=count, pixels=pixels) for one, count in zip(held, counts, strict=True)]


def rows_of(
    config: Config, source: SourceOptions, tokenizer: Tokenizer, limit: int | None, longest: int = 0
) -> tuple[list[HeldOut], int]:
    """Return the rows of a source, all its tokens, and their length (collective).

    Args:
        limit: number of rows, spread evenly; None: all.
        longest: the length that rows may have for documents that need it; 0: that of the config.
    """
    own = {name: getattr(source, name) for name in SourceOptions.__dataclass_fields__}
    length = config.data.seq_len
    data = replace(config.data, mixture=(), curriculum=(), seq_len=max(length, longest))
    config = replace(config, data=replace(data, **{**own, "streaming": False}))
    (prepared,), (corpus,), pixels = _opened(config, tokenizer, 0.0)
    split = corpus.training
    if isinstance(split, Joined):  # every token is in a row, and no row goes on into another file
        split = replace(split, parts=[ToTheEnd(part.name, part.tokens, part.offsets) for part in split.parts])
    elif isinstance(split, Stream):
        split = ToTheEnd(split.name, split.tokens, split.offsets)
    elif isinstance(split, Whole):
        split = replace(split, name="evaluation")
        length = max(length, min(longest, int(split.lengths.max(initial=0))))
    count = agree.together(lambda: split.n_samples(length)) or 0
    is_whole = limit is None or limit >= count
    size = getattr(corpus.meta, "n_source_bytes", None) if is_whole and prepared.scan.format == "text" else None
    rows = HeldOut(", ".join(source.source), split, count if is_whole else int(limit or count), size, pixels)
    return [rows], length


def _opened(
    config: Config, tokenizer: Tokenizer, fraction: float
) -> tuple[list[Prepared], list[Corpus], PixelReader | None]:
    parts = parts_of(config.data)
    config = replace(config, data=replace(config.data, validation_fraction=fraction))
    vision = vision_for(config)
    prepared = [prepare_once_per_node(config, part, tokenizer, Progress(), vision) for part in parts]
    opened = agree.together(lambda: open_parts(prepared, parts, vision))
    assert opened is not None
    if any(getattr(corpus.meta, "task", "") == PREFERENCE for corpus in opened[0]):
        raise UnsupportedError(
            "evaluate measures the cross entropy of text, and these records are pairs of answers (chosen and rejected):"
            " give text or conversations with --data"
        )
    return prepared, *opened


# --- run an evaluation on the ranks of a launcher, or on worker processes of this host

Result = TypeVar("Result")


@dataclass(frozen=True)
class DataOptions(SourceOptions):
    """How the source that is evaluated is read."""

    seq_len: int = 0
    """Tokens per row; 0: the run's data.seq_len, of a model of transformers at most 2048, and more for conversations
    that are longer, up to the model's maximum, where nobody set it."""
    cache: str = ""
    """Folder that keeps tokenized text; empty: meshwright's folder in the user's cache."""


@dataclass(frozen=True)
class EvaluationOptions:
    """Flags of ``meshwright evaluate`` with a section."""

    layout: Layout = field(default_factory=Layout)
    process: ProcessConfig = field(default_factory=ProcessConfig)
    data: DataOptions = field(default_factory=DataOptions)


def resolved_layout(layout: Layout, process: ProcessConfig, *, is_open: bool) -> tuple[Layout, int]:
    """Return the layout to evaluate on, and the number of processes to start; 1 under a launcher.

    Without one, an axis that nobody sizes has one rank, unless the number of processes is given.

    Args:
        is_open: ``layout.dp_shard`` is what is left, and nobody said so.

    Raises:
        ConfigError: the layout does not fit the number of ranks.
    """
    world = get_world_info()[2]
    if world > 1:
        return layout.resolve(world), 1
    if is_open and not process.count:
        layout = replace(layout, dp_shard=1)
    count = process.count or usual_processes(layout)
    return layout.resolve(count, ranks_per_node=count), count


def on_ranks(job: Callable[[Any], Result], request: Any, count: int, *, insists: bool) -> Result:
    """Run ``job(request)`` here, or on ``count`` worker processes, and return rank 0's result.

    Args:
        insists: somebody gave that number (``process.count``).

    Raises:
        MeshwrightError: a rank refused the request or failed; the text is for the user.
    """
    if count == 1:
        return ended(job, request)[0]
    pool = WorkerPool(count, oversubscribe=insists)
    with closing(pool):
        try:
            result, request.placed.opened.checkpoint = pool.run(ended, job, request)[0]
            return result
        except WorkerFailed as failure:
            raise for_the_user(failure) from None


def ended(job: Callable[[Any], Result], request: Any) -> tuple[Result, Location | None]:
    """Run a job, tear down the process group that it brought up, and return also the checkpoint that was read."""
    from meshwright.distributed.setup import destroy_distributed

    try:
        return job(request), request.placed.opened.checkpoint
    finally:
        destroy_distributed()


# --- compute the loss of rows over all their tokens, however ranks and batches deal them

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
    model: ParallelModel, chosen: Sequence[HeldOut], seq_len: int, tokenizer: Tokenizer, batch_rows: int = ROWS
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
                labels = batch["labels"]
                counted += int(((labels != IGNORE_INDEX) & (labels != tokenizer.end_of_document)).sum())
    # where a token is a byte, the labels are bytes of the text
    of_data_ranks, sizes = dict(agree.everybody_says((place[0], counted))), [part.source_bytes for part in chosen]
    size = None if None in sizes else sum(size for size in sizes if size is not None)
    size = sum(of_data_ranks.values()) if isinstance(tokenizer, ByteTokenizer) else size
    return Evaluation(total / weight if weight else math.nan, tokens, sum(part.samples for part in chosen), size)


# --- evaluate an opened model's loss, as one rank of however many


@dataclass(frozen=True)
class ModelOnRanks:
    """An opened model, and the layout on which the ranks evaluate it."""

    opened: Opened
    layout: Layout
    process: ProcessConfig

    def model(self) -> ParallelModel:
        """Bring the ranks up, and read the model (collective)."""
        p = self.process
        limits: dict[str, Any] = {"startup_timeout_sec": p.startup_timeout_sec, "nccl_timeout_sec": p.step_timeout_sec}
        return self.opened.model(DistributedConfig(**vars(self.layout), backend=p.backend, **limits))


@dataclass(frozen=True)
class TextRequest:
    """The loss of a model on a source.

    Attributes:
        source: None: the validation part of the run's own data.
        seq_len: tokens per row; 0: as the model was trained, longer for what needs it if nobody set that.
        limit: number of rows; None: all.
        batch_rows: rows per forward of a data rank.
    """

    placed: ModelOnRanks
    source: SourceOptions | None = None
    seq_len: int = 0
    cache: str = ""
    limit: int | None = None
    batch_rows: int = ROWS


def evaluate_loss(request: TextRequest) -> Evaluation:
    """Evaluate on this rank (collective).

    Raises:
        ConfigError: rows are longer than the model takes, or the source cannot be used.
    """
    opened = request.placed.opened
    data = opened.config.data
    data = replace(data, seq_len=request.seq_len or data.seq_len, cache=request.cache or data.cache)
    config = replace(opened.config, data=data)
    model = request.placed.model()
    longest = model.facts.max_seq_len
    if longest is not None and data.seq_len > longest:
        raise ConfigError(
            f"--data.seq_len = {data.seq_len}: the model takes rows of at most {longest} tokens; lower it"
        )
    if request.source is None:
        chosen, length = own_rows(config, opened.tokenizer, request.limit), data.seq_len
    else:
        asked = opened.config if opened.checkpoint is None else read_request(opened.path)
        is_free = not request.seq_len and asked is not None and is_unset(asked.data.seq_len)
        most = (longest or LONGEST_ROW) if is_free else 0
        chosen, length = rows_of(config, request.source, opened.tokenizer, request.limit, most)
    return evaluate_rows(model, chosen, length, opened.tokenizer, request.batch_rows)
