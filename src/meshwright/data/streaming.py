"""Tokenise samples on demand, for sources that are too large or change too often to be tokenised beforehand.

Documents are read in the order of the files, repeatedly. Every rank reads all of them and uses its own rows, so that
each layout sees the same samples. A stream cannot seek: to continue at sample n, all earlier samples are read and
tokenised again.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from itertools import chain, repeat
from typing import Any

import numpy as np

from meshwright.core.errors import ConfigError, UnsupportedError
from meshwright.data.corpus.packing import Whole

from .corpus.building import TokenisingRecipe
from .corpus.packing import Rows, Split, Stream, gather
from .row_ends import row_lengths
from .text.preference import TASK as PREFERENCE

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
            pieces = [(self._windows[k][1], which == k, indexes[which == k] - firsts[k]) for k in np.unique(which)]
            self._hold(int(indexes.min()) if self._lowest is None else self._lowest)
        return gather(pieces, len(indexes), self.seq_len)

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
