"""Load each data rank's rows of every global batch.

The loader's whole state is one integer: the number of samples that all ranks have consumed.
"""

from __future__ import annotations

import queue
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from itertools import chain, repeat
from typing import TYPE_CHECKING, Any

import numpy as np

from meshwright.core.errors import ConfigError, MeshwrightError, UnsupportedError

from .building import TokenisingRecipe
from .mixture import Samples
from .packing import IGNORE_INDEX, RowEnds, Rows, Split, Stream, Whole, ended, gather, lengths_at, row_lengths
from .tasks import TASK as PREFERENCE

if TYPE_CHECKING:
    import torch

_WINDOW_ROWS = 64
"""Number of rows packed together. It is a constant because it decides which documents share a row."""

_WINDOWS = 8
"""Number of windows held at least, for readers whose requests are slightly out of order."""

_LENGTHS = 4096
"""Number of windows whose rows' lengths are known: many more, since a step's are asked for once it was read."""

Documents = Iterator[tuple[np.ndarray, np.ndarray | None]]


class StreamedSamples:
    """The samples of a recipe's documents: readable at any index, but only sequential reads are cheap.

    Args:
        say: callback that receives a message when samples must be skipped, and one with the time it took.

    Raises:
        UnsupportedError: the documents are pairs, or have images.
        ConfigError: at the first read, for a source without a document or a conversation that is too long.
    """

    def __init__(self, recipe: TokenisingRecipe, seq_len: int, say: Callable[[str], None]):
        if recipe.task.name == PREFERENCE:
            raise UnsupportedError(
                "data.streaming packs documents as they come, which parts the two answers of a preference pair: leave"
                " data.streaming out, and pairs are tokenised once, into a cache (or data.task = 'chat' with"
                " data.column = 'chosen' streams the chosen conversations alone)"
            )
        if recipe.task.pictured is not None:
            raise UnsupportedError(
                "data.streaming reads no images: leave streaming out (images are opened as their rows are needed, and"
                " only their paths are kept)"
            )
        self.recipe, self.seq_len, self._say, self.rows_together = recipe, seq_len, say, 1
        self.splits: tuple[Split, ...] = ()  # no split is known whole, so neither is its longest row
        self._lock = threading.Lock()
        self._windows: deque[tuple[int, Split]] = deque()
        self._lengths: deque[tuple[int, np.ndarray]] = deque(maxlen=_LENGTHS)
        self._lowest: int | None = None
        self._begin_again()

    def _begin_again(self) -> None:
        self._windows.clear()
        self._lengths.clear()
        self._coming, self._epochs, self._end = self._read(), 0, 0

    def rows(self, indexes: np.ndarray) -> Rows:
        """Return the samples at ``indexes`` (integers, 0 or more, shape (rows,)); see ``packing.Rows``."""
        indexes = np.asarray(indexes, dtype=np.int64)
        with self._lock:
            self._read_to(indexes, self._windows)
            firsts = np.array([first for first, _ in self._windows])
            which = np.searchsorted(firsts, indexes, side="right") - 1
            windows = [split for _, split in self._windows]
            self._hold(int(indexes.min()) if self._lowest is None else self._lowest)
        return gather(windows, which, indexes - firsts[which], self.seq_len)

    def row_lengths(self, indexes: np.ndarray) -> np.ndarray:
        """Return the most tokens that the samples at ``indexes`` hold before their padding: int64.

        Windows from the lowest of them on are held, since rows among them will be asked for.
        """
        indexes = np.asarray(indexes, dtype=np.int64)
        if not self.recipe.task.is_whole:
            return np.full(len(indexes), self.seq_len)
        with self._lock:
            self._read_to(indexes, self._lengths)
            self._lowest = int(indexes.min())
            return np.concatenate([lengths for _, lengths in self._lengths])[indexes - self._lengths[0][0]]

    def _read_to(self, indexes: np.ndarray, held: deque[tuple[int, Any]]) -> None:
        """Read windows up to the highest of the indexes; from the beginning if ``held`` lacks the lowest."""
        if held and indexes.min() < held[0][0]:
            self._begin_again()
        passed, begun = int(indexes.min()) - self._end, time.monotonic()
        if is_far := passed >= 4 * _WINDOW_ROWS:
            self._say(f"the source is streamed and cannot seek: passing over {passed} samples")
        while self._end <= indexes.max():
            try:
                split, n = next(self._coming)
            except BaseException:
                self._begin_again()  # an interrupted generator cannot continue
                raise
            self._windows.append((self._end, split))
            self._lengths.append((self._end, np.broadcast_to(row_lengths(split, self.seq_len), n)))
            self._end += n
            self._hold(int(indexes.min()))
        if is_far:
            self._say(f"passed over {passed} samples in {time.monotonic() - begun:.1f} s")

    def _hold(self, lowest: int) -> None:
        """Let go of windows that end at or before a sample, but for the last few."""
        while len(self._windows) > _WINDOWS and self._windows[1][0] <= lowest:
            self._windows.popleft()

    def _read(self) -> Iterator[tuple[Split, int]]:
        """Yield windows of rows with their number, endlessly."""
        documents = self._documents()
        left: list[tuple[np.ndarray, Any]] = []
        while True:
            split, left = (self._whole if self.recipe.task.is_whole else self._cut)(chain(left, documents))
            yield split, split.n_samples(self.seq_len) if self.recipe.task.is_whole else _WINDOW_ROWS

    def _documents(self) -> Documents:
        tellers = chain([self._say], repeat(lambda line: None))  # problems of rows are reported only in the first epoch
        for say in tellers:
            is_empty = True
            encoder = self.recipe.encoder()
            for _, ids, learnt, _ in encoder.encode(self.recipe.unsplit(say)):
                yield ids, learnt
                is_empty = False
            for note in encoder.notes():
                say(note)
            self._epochs += 1
            if is_empty:
                raise ConfigError(f"data.source = {list(self.recipe.options.source)} holds no document")

    def _cut(self, documents: Documents) -> tuple[Split, list[tuple[np.ndarray, None]]]:
        """Cut a window of full rows; return it and the remaining tokens, which begin with the window's last label."""
        wanted, parts, size = _WINDOW_ROWS * self.seq_len, [], 0
        while size <= wanted:
            parts.append(next(documents)[0])
            size += len(parts[-1])
        tokens = np.concatenate(parts)
        offsets = np.cumsum([0, *map(len, parts)])
        inside = offsets[offsets <= wanted + 1]  # the last label may begin a document
        stream = Stream(
            "training", tokens[: wanted + 1], np.append(inside, wanted + 1) if inside[-1] <= wanted else inside
        )
        after = offsets[offsets > wanted]
        edges = [wanted, *after] if after[0] != wanted else list(after)
        return stream, [(tokens[begin:end], None) for begin, end in zip(edges[:-1], edges[1:], strict=True)]

    def _whole(self, documents: Documents) -> tuple[Split, list]:
        """Pack a window of whole documents; nothing remains for the next window."""
        wanted, parts, marks, size, since = _WINDOW_ROWS * self.seq_len, [], [], 0, self._epochs
        policy = self.recipe.options.too_long
        while size < wanted:
            ids, learnt = next(documents)
            if len(ids) > self.seq_len and policy == "skip":
                if self._epochs > since + 1 and not size:
                    raise ConfigError(f"no conversation of data.source fits data.seq_len = {self.seq_len}: raise it")
                continue
            if len(ids) > self.seq_len and policy == "refuse":
                raise ConfigError(
                    f"a conversation of {len(ids)} tokens is longer than data.seq_len = {self.seq_len}: set"
                    f" data.too_long = 'truncate' or 'skip', with which a run that has begun goes on, or begin a new"
                    f" run with a larger data.seq_len"
                )
            parts.append(ids)
            marks.append(learnt)
            size += min(len(ids), self.seq_len)
        offsets, end = np.cumsum([0, *map(len, parts)]), self.recipe.tokenizer.end_of_document
        learnt = np.concatenate(marks).astype(np.uint8)
        return Whole("training", np.concatenate(parts), offsets, learnt, policy, end), []


Finish = Callable[[Rows], Rows]

_AHEAD = 2
"""Batches read ahead per worker."""


SampleSequence = Samples | StreamedSamples
"""An endless sequence of samples that can be read at any index."""


class Loader(Iterator["dict[str, torch.Tensor] | list[dict[str, torch.Tensor]]"]):
    """An endless iterator over one data rank's part of the global batches.

    The global batch after ``consumed`` samples has the samples at the indexes [consumed, consumed + B); data rank r of
    D takes the contiguous part [r*B/D, (r+1)*B/D) of them. So the numbers of data ranks, workers and microbatches may
    change between two batches without any effect on the sequence of samples.

    ``next(loader)`` returns a dict of int64 CPU tensors of shape (B/D, seq_len): see ``Rows`` for the keys. With
    ``ends`` rows are shorter, and where these have microbatches, it returns a list of such dicts, one for each.

    Args:
        samples: the sequence of samples to read.
        global_batch: number of samples per step over all data ranks (B).
        rank: this process's data rank, in [0, world).
        world: number of data ranks (D).
        workers: number of threads that read ahead; with 0, ``next`` reads.
        finish: function that makes a batch of this rank's rows, such as one that opens their images; it runs where rows
            are read.
        skip_unreadable: if True, a sample whose read raises an OSError or a MeshwrightError becomes a row without
            labels, recorded in ``unreadable``; otherwise ``next`` raises the error.
        ends: where the rows of a microbatch end; None: all have ``seq_len`` tokens.

    Raises:
        ConfigError: ``world`` does not divide ``global_batch``, a rank would get half a pair, or a size is out of
            range.
    """

    def __init__(
        self,
        samples: SampleSequence,
        global_batch: int,
        rank: int = 0,
        world: int = 1,
        workers: int = 0,
        *,
        finish: Finish | None = None,
        skip_unreadable: bool = False,
        ends: RowEnds | None = None,
    ):
        _check_rank(rank, world)
        if global_batch < 1 or global_batch % world:
            near = max(global_batch // world, 1) * world
            raise ConfigError(
                f"batch.global_batch = {global_batch} samples cannot be dealt evenly to {world} data ranks"
                f" (dp_replicate * dp_shard). Legal: a multiple of {world}, like {near} or {near + world}; or a number"
                f" of data ranks that divides {global_batch}"
            )
        if (global_batch // world) % samples.rows_together:
            step = world * samples.rows_together
            near = max(global_batch // step, 1) * step
            raise ConfigError(
                f"batch.global_batch = {global_batch} rows are {global_batch // world} for each of {world} data ranks,"
                f" and each pair of answers takes {samples.rows_together}. Legal: a multiple of {step}, like {near} or"
                f" {near + step}"
            )
        if workers < 0:
            raise ConfigError(
                f"data.workers = {workers}: the number of threads that read ahead is 0 (read when asked) or more"
            )
        rows = global_batch // world
        self._read = _BatchReader(samples, rank, world, rows, {} if skip_unreadable else None, finish, ends)
        self.global_batch = global_batch
        self._consumed = 0
        self._threads = _Threads(self._read, workers)
        self._depth = workers * _AHEAD
        self._pending: deque[Future] = deque()
        # The threads refer to the reader, never to the loader, so they end when the loader is garbage-collected.
        self._stop = weakref.finalize(self, self._threads.stop)

    @property
    def state(self) -> int:
        """Number of samples that all ranks have consumed; samples that were only read ahead do not count."""
        return self._consumed

    @property
    def unreadable(self) -> dict[int, str]:
        """Index of each sample of this rank that could not be read, with the error; samples read ahead included."""
        return dict(self._read.unreadable or {})

    def seek(self, consumed: int) -> None:
        """Continue after ``consumed`` samples (a ``state``, or any index of the order), at no cost.

        Raises:
            ConfigError: ``consumed`` is below 0.
        """
        if consumed < 0:
            raise ConfigError(f"seek({consumed}): the number of samples consumed is 0 or more")
        self._consumed = consumed
        while self._pending:
            self._pending.popleft().cancel()

    def __next__(self) -> dict[str, torch.Tensor] | list[dict[str, torch.Tensor]]:
        """Return the next batch, or its microbatches.

        An error of a reader is raised here; the state is then unchanged, and the next call tries again.
        """
        if not self._stop.alive:
            raise MeshwrightError(f"this loader was closed; make another and go on with seek({self._consumed})")
        while len(self._pending) < self._depth:
            self._pending.append(self._threads.submit(self._consumed + len(self._pending) * self.global_batch))
        try:
            read = self._pending.popleft().result() if self._depth else self._read(self._consumed)
        except BaseException:
            self.seek(self._consumed)
            raise
        self._consumed += self.global_batch
        pieces = [_tensors(rows) for rows in read]
        return pieces if len(pieces) > 1 else pieces[0]

    def close(self) -> None:
        """Stop the threads without waiting for them. A closed loader has no next batch."""
        self.seek(self._consumed)
        self._stop()

    def __enter__(self) -> Loader:
        return self

    def __exit__(self, *error) -> None:
        self.close()


def validation_batches(
    split: Split,
    seq_len: int,
    samples: int,
    rows: int,
    rank: int = 0,
    world: int = 1,
    finish: Finish | None = None,
    ends: RowEnds | None = None,
    unreadable: dict[int, str] | None = None,
) -> Iterator[dict[str, torch.Tensor]]:
    """Return an iterator over a fixed choice of at most ``samples`` samples, spread evenly over ``split``.

    Batches have ``rows`` rows per data rank. All ranks get the same number of batches of the same shape (so they can
    run collectives), and together the same samples for every ``world``. Padding rows have every label IGNORE_INDEX.
    ``finish`` and ``ends``: as for ``Loader``. ``unreadable`` notes rows that cannot be read, which have no labels;
    None: they raise.

    Raises:
        ConfigError: at the call, for a size below 1, a rank outside [0, world), rows that would part pairs, or a split
            without a sample (see ``n_samples``).
    """
    _check_rank(rank, world)
    for name, value in (("samples", samples), ("rows", rows)):
        if value < 1:
            raise ConfigError(f"validation_batches: {name} = {value} must be at least 1")
    together = split.rows_together
    if rows % together:
        raise ConfigError(
            f"validation_batches: rows = {rows} per data rank, and each pair of answers takes {together}: make it even"
        )
    n = split.n_samples(seq_len) // together
    count = min(max(samples // together, 1), n)
    chosen = (np.arange(count)[:, None] * n // count * together + np.arange(together)).reshape(-1)
    count *= together
    per_batch = rows * world
    padded = np.pad(chosen, (0, -count % per_batch)).reshape(-1, world, rows)
    real = np.pad(np.ones(count, dtype=bool), (0, -count % per_batch)).reshape(-1, world, rows)[:, rank]

    def batches() -> Iterator[dict[str, torch.Tensor]]:
        for of_ranks, is_real in zip(padded, real, strict=True):
            length = seq_len
            if ends is not None:
                length = ends.length([split], lengths_at(split, of_ranks, seq_len), seq_len)

            def read(indexes: np.ndarray, length: int = length) -> Rows:
                return ended(split.rows(indexes, seq_len), length)

            batch = _readable(read, of_ranks[rank], together, length, finish, unreadable)
            batch["labels"][~is_real] = IGNORE_INDEX
            yield _tensors(batch)

    return batches()


@dataclass(frozen=True)
class _BatchReader:
    """Reads one rank's rows of the global batch after ``consumed`` samples."""

    samples: SampleSequence
    rank: int
    world: int
    n_rows: int
    unreadable: dict[int, str] | None
    """Index and error of each sample left out; None: raise errors instead."""
    finish: Finish | None = None
    ends: RowEnds | None = None

    def __call__(self, consumed: int) -> list[Rows]:
        """Return the rows in pieces that have a length of their own."""
        each, pieces = (self.ends.microbatch if self.ends else 0) or self.n_rows, []
        for begin in range(0, self.n_rows, each):
            wanted = np.arange(begin, min(begin + each, self.n_rows), dtype=np.int64)
            of_ranks = consumed + np.arange(self.world)[:, None] * self.n_rows + wanted
            length = self.samples.seq_len
            if self.ends is not None:
                found = self.samples.row_lengths(of_ranks.reshape(-1))
                length = self.ends.length(self.samples.splits, found, length)

            def read(of_rows: np.ndarray, length: int = length) -> Rows:
                return ended(self.samples.rows(of_rows), length)

            together = self.samples.rows_together
            pieces.append(_readable(read, of_ranks[self.rank], together, length, self.finish, self.unreadable))
        return pieces


def _readable(
    read: Callable[[np.ndarray], Rows],
    indexes: np.ndarray,
    together: int,
    length: int,
    finish: Finish | None,
    unreadable: dict[int, str] | None,
) -> Rows:
    """Read and finish rows; those that cannot be read have no labels, and are noted in ``unreadable`` (None: raise)."""
    finished = finish or (lambda rows: rows)
    try:
        return finished(read(indexes))
    except (OSError, MeshwrightError):
        if unreadable is None:
            raise

    def group(of_group: np.ndarray) -> Rows:
        try:
            rows = read(of_group)
            finished(dict(rows))  # only to see whether it can be; groups are finished together
            return rows
        except (OSError, MeshwrightError) as error:
            unreadable.update(dict.fromkeys(of_group.tolist(), f"{type(error).__name__}: {error}"))
        empty = np.zeros((len(of_group), length), dtype=np.int64)
        return {"tokens": empty, "labels": empty + IGNORE_INDEX, "positions": empty, "document_ids": empty}

    rows = [group(of_group) for of_group in indexes.reshape(-1, together)]
    others = {key: values for row in rows for key, values in row.items()}
    rows = [{key: row.get(key, np.zeros_like(others[key])) for key in others} for row in rows]
    return finished({key: np.concatenate([row[key] for row in rows]) for key in others})


class _Threads:
    """Threads that read batches ahead.

    This is not a ThreadPoolExecutor, whose threads are joined when the interpreter exits: a read that never returns
    (from a lost file system) would keep the process alive forever.
    """

    def __init__(self, read: _BatchReader, workers: int):
        self._tasks: queue.SimpleQueue[tuple[int, Future] | None] = queue.SimpleQueue()
        self._workers, tasks = workers, self._tasks

        def serve() -> None:
            while (task := tasks.get()) is not None:
                consumed, future = task
                if future.set_running_or_notify_cancel():
                    try:
                        future.set_result(read(consumed))
                    except BaseException as error:  # noqa: BLE001 (passed to the caller, who would wait forever)
                        future.set_exception(error)

        for number in range(workers):
            threading.Thread(target=serve, name=f"meshwright-reader-{number}", daemon=True).start()

    def submit(self, consumed: int) -> Future:
        future: Future = Future()
        self._tasks.put((consumed, future))
        return future

    def stop(self) -> None:
        for _ in range(self._workers):
            self._tasks.put(None)


def _check_rank(rank: int, world: int) -> None:
    if world < 1:
        raise ConfigError(f"{world} data ranks: there must be at least 1")
    if not 0 <= rank < world:
        raise ConfigError(f"data rank {rank} of {world}: legal ranks are 0 to {world - 1}")


def _tensors(rows: Rows) -> dict[str, torch.Tensor]:
    import torch

    return {name: torch.from_numpy(array) for name, array in rows.items()}
