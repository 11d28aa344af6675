"""Copy a state at one step into memory that a writer shares, while training goes on to the next optimizer step.

Weights and optimizer state do not change in a forward or a backward, so they are copied meanwhile, and whoever changes
them next (``core.readers``) first copies what is left. What a forward may change is copied at once.
"""

from __future__ import annotations

import mmap
import os
import tempfile
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from meshwright.core import devices, readers
from meshwright.core.devices import is_accelerator
from meshwright.core.dtypes import bytes_text
from meshwright.core.errors import ConfigError, IntegrityError
from meshwright.core.torch_private import version_of
from meshwright.distributed.weights.shards import pieces

from .state import StateTensor, dtype_word

ALIGNED = 8
"""Every piece begins at a multiple of this many bytes."""
AT_A_TIME = 1 << 25
"""Bytes that one thread copies before it looks whether another may help, or waits."""
WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class SharedMemory:
    """Memory without a name that this process and its writer see; it is gone with the last of the two."""

    def __init__(self, size: int, device: torch.device):
        self.size = max(size, mmap.PAGESIZE)
        if hasattr(os, "memfd_create"):  # /dev/shm of a container may have 64 MB
            self.file = os.memfd_create("meshwright-snapshot")
        else:
            with tempfile.TemporaryFile() as file:
                self.file = os.dup(file.fileno())
        os.ftruncate(self.file, self.size)
        self.bytes = torch.frombuffer(mmap.mmap(self.file, self.size), dtype=torch.uint8)
        if is_accelerator(device):
            devices.pin_shared(self.bytes, device)
        weakref.finalize(self, os.close, self.file)  # an open file keeps its memory


@dataclass(frozen=True)
class Box:
    """A box of a whole tensor.

    Attributes:
        begin: its first byte in the shared memory.
        of: number of the piece of this rank that it is a part of, and its first row there.
    """

    key: str
    offset: tuple[int, ...]
    shape: tuple[int, ...]
    dtype: str
    bytes: int
    of: tuple[int, int] = (0, 0)
    begin: int = 0

    @property
    def end(self) -> int:
        return self.begin + self.bytes


def boxes_of(state: Mapping[str, StateTensor]) -> list[Box]:
    """List the boxes of the state that this rank holds."""
    return [
        Box(
            key,
            tuple(piece.offset),
            tuple(piece.local.shape),
            word,
            piece.local.numel() * stored.dtype.itemsize,
            (n, 0),
        )
        for key, stored in state.items()
        for word in [dtype_word(stored.dtype)]
        for n, piece in enumerate(pieces(stored.like))
    ]


def owners(by_rank: Sequence[Sequence[Box]]) -> list[set[int]]:
    """Give each box to one of the ranks that hold it: numbers in its list, by rank. All ranks compute the same.

    Large ones first, each to the rank that has least to write so far.
    """
    holders: dict[tuple[str, tuple[int, ...]], list[tuple[int, int]]] = {}
    for rank, boxes in enumerate(by_rank):
        for number, box in enumerate(boxes):
            holders.setdefault((box.key, box.offset), []).append((rank, number))
    load, found = [0] * len(by_rank), [set[int]() for _ in by_rank]
    sizes = {place: by_rank[there[0][0]][there[0][1]].bytes for place, there in holders.items()}
    for place in sorted(holders, key=lambda place: (-sizes[place], place)):
        rank, number = min(holders[place], key=lambda holder: (load[holder[0]], holder[0]))
        found[rank].add(number)
        load[rank] += sizes[place]
    return found


def portions(boxes: Iterable[Box], most: int) -> list[list[Box]]:
    """Place boxes in shared memory of at most ``most`` bytes (0: as much as they need), one portion after the other.

    Raises:
        ConfigError: one row of a tensor has more than that.
    """
    found: list[list[Box]] = [[]]
    end = 0
    for box in boxes:
        cut = [box]
        if most and box.bytes > most:
            row = box.bytes // box.shape[0] if box.shape else box.bytes
            if row > most:
                raise ConfigError(
                    f"checkpoint.host_memory: one row of {box.key} has {bytes_text(row)}, and a save may hold"
                    f" {bytes_text(most)}: give it more"
                )
            cut, rows = [], most // row
            for low in range(0, box.shape[0], rows):
                high = min(low + rows, box.shape[0])
                offset, shape = (box.offset[0] + low, *box.offset[1:]), (high - low, *box.shape[1:])
                of = box.of[0], box.of[1] + low
                cut.append(Box(box.key, offset, shape, box.dtype, (high - low) * row, of))
        for part in cut:
            begin = -(-end // ALIGNED) * ALIGNED
            if most and found[-1] and begin + part.bytes > most:
                found.append([])
                begin = 0
            found[-1].append(Box(**{**vars(part), "begin": begin}))
            end = begin + part.bytes
    return found


@dataclass(frozen=True)
class _Task:
    """Boxes of one tensor that one thread copies."""

    stored: StateTensor
    boxes: tuple[Box, ...]


class Snapshot:
    """The state at the step at which this is made, on its way into shared memory, portion by portion.

    Args:
        state: what this rank holds.
        parts: the boxes that this rank writes, by portion.
        look: called now and then while the next optimizer step waits, with the time since which it does.

    Attributes:
        problem: why the copies are not the state, "" where they are.
    """

    def __init__(
        self,
        state: Mapping[str, StateTensor],
        parts: list[list[Box]],
        memory: SharedMemory,
        device: torch.device,
        look: Callable[[float], object] = abs,
    ):
        self.parts, self.memory, self.problem, self._look = parts, memory, "", look
        self._changed = threading.Condition()
        self._tasks: deque[_Task] = deque()
        self._copying, self._is_over = 0, False
        self._versions = {key: [_version(plain) for plain in stored.memory] for key, stored in state.items()}
        self._device = torch.get_device_module(device) if is_accelerator(device) else None
        self._stream: Any = None
        if self._device is not None:
            self._stream = self._device.Stream()
            self._stream.wait_stream(self._device.current_stream())
        # what a forward may change is copied now: to its place, or beside it where its place is in a later portion
        early = {key for key, stored in state.items() if stored.at_once}
        first = [box for box in parts[0] if box.key in early]
        later = {box.key for part in parts[1:] for box in part if box.key in early}
        self.state = dict(state)
        for key in later:
            stored = state[key]
            self.state[key] = StateTensor(stored.values().clone(), stored.dtype, (), at_once=True)
            self._versions[key] = []
        for task in _tasks(self.state, first):
            self._copy(task)
        self._early = {box.key for box in first} - later
        if self._device is not None:
            self._device.current_stream().wait_stream(self._stream)
        readers.add(self.finish)

    def copy(self, number: int) -> None:
        """Copy a portion, with the help of whoever waits for the snapshot, into the shared memory, which is free."""
        with self._changed:
            wanted = [box for box in self.parts[number] if number or box.key not in self._early]
            self._tasks.extend(_tasks(self.state, wanted))
            self._changed.notify_all()
        while self._copy_one():
            pass
        with self._changed:
            self._changed.wait_for(lambda: not self._copying)
            is_last = number == len(self.parts) - 1
        if is_last:
            self.end()
        if self._stream is not None:
            self._stream.synchronize()
        if self.problem:
            raise IntegrityError(self.problem)

    def finish(self) -> None:
        """Return when the state may change: all of it is copied (on a device, queued before what follows)."""
        begun = time.perf_counter()
        while True:
            if self._copy_one():
                continue
            with self._changed:
                if self._is_over:
                    break
                if self._changed.wait_for(lambda: self._is_over or self._tasks, 0.1):
                    continue
            self._look(begun)
        if self._device is not None:
            self._device.current_stream().wait_stream(self._stream)

    def end(self) -> None:
        """Let go of the state, whether it is copied or given up."""
        with self._changed:
            self._tasks.clear()
            self._changed.wait_for(lambda: not self._copying)
            self._is_over = True
            self._changed.notify_all()
        readers.remove(self.finish)

    def _copy_one(self) -> bool:
        with self._changed:
            if not self._tasks:
                return False
            task = self._tasks.popleft()
            self._copying += 1
        try:
            self._copy(task)
        except Exception as error:  # noqa: BLE001  (whoever steps next would get it otherwise)
            self.problem = self.problem or f"{task.boxes[0].key} cannot be copied: {type(error).__name__}: {error}"
        finally:
            with self._changed:
                self._copying -= 1
                self._changed.notify_all()
        return True

    @torch.no_grad()
    def _copy(self, task: _Task) -> None:
        with self._device.stream(self._stream) if self._device is not None else nullcontext():
            found = pieces(task.stored.values())
            for box in task.boxes:
                number, row = box.of
                source = found[number].local
                if source.dim():
                    source = source[row : row + box.shape[0]]
                target = self.memory.bytes[box.begin : box.end].view(source.dtype).view(source.shape)
                word = WORDS.get(source.dtype.itemsize)
                if source.device.type == "cpu" and word is not None and type(source) is Tensor:
                    # by one thread, which leaves training the others
                    np.copyto(target.view(word).numpy(), source.view(word).numpy())
                else:
                    target.copy_(source, non_blocking=True)
        key = task.boxes[0].key
        if [_version(plain) for plain in task.stored.memory] != self._versions[key]:
            self.problem = self.problem or (
                f"{key} was changed while a save was still copying it. Whoever writes weights other than by an"
                f" optimizer's step waits for the save first: handle.wait()"
            )


def _tasks(state: Mapping[str, StateTensor], boxes: Iterable[Box]) -> Iterator[_Task]:
    """Cut what is copied as it lies into tasks of some rows; values that are computed are one task."""
    computed: dict[str, list[Box]] = {}
    for box in boxes:
        stored = state[box.key]
        if stored.made is not None:
            computed.setdefault(box.key, []).append(box)
            continue
        row = box.bytes // box.shape[0] if box.shape else box.bytes
        rows = max(1, AT_A_TIME // max(row, 1))
        for low in range(0, box.shape[0], rows) if box.shape else [0]:
            count = min(rows, box.shape[0] - low) if box.shape else 1
            shape = (count, *box.shape[1:]) if box.shape else ()
            where = {"of": (box.of[0], box.of[1] + low), "begin": box.begin + low * row}
            yield _Task(stored, (Box(box.key, box.offset, shape, box.dtype, count * row, **where),))
    for key, wanted in computed.items():
        yield _Task(state[key], tuple(wanted))


def _version(plain: Tensor) -> int:
    return 0 if plain.is_inference() else version_of(plain)


def bytes_in(parts: Iterable[Iterable[Box]]) -> int:
    return sum(box.bytes for part in parts for box in part)


def room_for(parts: Iterable[Sequence[Box]]) -> int:
    """Return the bytes of shared memory that the portions need, one after the other."""
    return max((part[-1].end for part in parts if part), default=0)
