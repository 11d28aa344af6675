"""Note what each stream reads and writes, and find accesses that nothing puts in an order.

Each stream, and the host, has a vector clock (Mattern, Virtual Time and Global States of Distributed Systems, 1989):
how far it has seen each of the others come. A kernel is issued by the host, so its stream has seen what the host has;
an event carries its stream's clock; whoever waits takes it over. Two accesses to the same bytes, one of them a write,
are a race unless the later one's clock has the earlier one's time.
"""

from __future__ import annotations

import sys
import threading
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from . import memory
from .findings import HOST, Access, DeviceTrace, EarlyFree, HostRead, Line, Race
from .torch_private import autograd_node

if TYPE_CHECKING:
    from .memory import Allocation

Clock = dict[int, int]
"""Stream -> how many of its accesses have been seen."""

TORCH = str(Path(torch.__file__).parent)
HERE = str(Path(__file__).parent)


class DeviceWatch:
    """Vector clocks, and the accesses that a later one may still meet. Used through ``watching``.

    Memory that is freed belongs to its stream at once, as with CUDA's caching allocator: whatever other streams still
    do there must be over before the first access of the next allocation on that stream.
    """

    def __init__(self) -> None:
        self.seen = DeviceTrace()
        self.clocks: dict[int, Clock] = defaultdict(dict)
        self._accesses: dict[int, dict[tuple[Any, ...], tuple[Access, bool]]] = defaultdict(dict)
        self._unfinished: dict[int, list[Access]] = defaultdict(list)
        self._left_behind: dict[int, list[Access]] = {}
        self.lock = threading.RLock()

    def issue(self, stream: int) -> int:
        """Let the host issue a kernel on a stream, and return the kernel's time."""
        clock = self.clocks[stream]
        join(clock, self.clocks[HOST])
        clock[stream] = clock.get(stream, 0) + 1
        return clock[stream]

    def access(self, key: int, access: Access, *, writes: bool, what: str) -> None:
        """Note an access, and find the noted ones that it is not ordered behind."""
        seen, clock = self._accesses[key], self.clocks[access.stream]
        for other, other_writes in list(seen.values()):
            if other.stream == access.stream or not (writes or other_writes):
                continue
            if clock.get(other.stream, 0) < other.time and access.meets(other):
                self.seen.races.append(Race(other, access, what))
        for earlier in self._left_behind.pop(key, ()):
            if access.stream != earlier.stream and clock.get(earlier.stream, 0) < earlier.time:
                self.seen.early_frees.append(EarlyFree(earlier, access))
        seen[access.stream, access.begin, access.end, access.shape, writes] = (access, writes)

    def free(self, block: Allocation) -> None:
        """Give memory back to its stream, which the next allocation there may get."""
        for access, _ in self._accesses.pop(block.number, {}).values():
            if access.stream not in (block.home, HOST) and access.stream not in block.others:
                self._unfinished[block.home].append(access)
        self._left_behind.pop(block.number, None)

    def allocate(self, block: Allocation) -> None:
        """Let an allocation get memory that was freed on its stream, with what other streams still do there."""
        clock = dict(self.clocks[block.home])
        join(clock, self.clocks[HOST])
        still = [access for access in self._unfinished[block.home] if clock.get(access.stream, 0) < access.time]
        self._unfinished[block.home] = still
        if still:
            self._left_behind[block.number] = list(still)


def join(clock: Clock, other: Clock) -> None:
    """Let a clock see all that another has seen."""
    for stream, time in other.items():
        if clock.get(stream, 0) < time:
            clock[stream] = time


_watch: DeviceWatch | None = None


def begin() -> DeviceWatch:
    """Begin to watch."""
    global _watch
    _watch = DeviceWatch()
    return _watch


def end() -> None:
    """End watching."""
    global _watch
    _watch = None


def current() -> DeviceWatch | None:
    """Return the watch that is on."""
    return _watch


def clock_of(stream: int) -> Clock:
    """Return a stream's clock; a stream that has waited for the host's calls so far has its clock too."""
    return {} if _watch is None else _watch.clocks[stream]


def wait(stream: int, clock: Clock) -> None:
    """Let a stream's later kernels wait for what a clock has."""
    if _watch is not None:
        with _watch.lock:
            join(_watch.clocks[stream], clock)


def host_waits(clock: Clock, why: str) -> None:
    """Let the host wait for what a clock has."""
    if _watch is not None:
        with _watch.lock:
            join(_watch.clocks[HOST], clock)
            _watch.seen.host_reads.append(HostRead(why, line_of(why)))


def count_event() -> None:
    if _watch is not None:
        _watch.seen.events += 1


def line_of(doing: str) -> Line:
    """Return the innermost line outside torch and this package."""
    frame = sys._getframe(1)
    while frame is not None:
        name = frame.f_code.co_filename
        passes_on = frame.f_code.co_name in ("__torch_dispatch__", "__torch_function__")
        if not (passes_on or name.startswith((TORCH, HERE, "<")) or "contextlib" in name):
            return Line(name, frame.f_lineno, doing, autograd_node())
        frame = frame.f_back
    return Line("", 0, doing, autograd_node())


def argument_of_call(function: str, argument: str) -> Any:
    """Return an argument of the call of a function that is under way; None where none is."""
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_name == function:
            return frame.f_locals[argument]
        frame = frame.f_back
    return None


def access_of(tensor: Tensor, address: int, stream: int, time: int, line: Line) -> Access:
    """Describe the bytes of a tensor that has elements, from the address of its memory's first byte."""
    width = tensor.element_size()
    begin = tensor.data_ptr() - address
    extent = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)) + 1
    shape = (tuple(tensor.shape), tensor.stride(), width)
    return Access(stream, time, begin, begin + extent * width, shape, line)


def launch(doing: str, stream: int, reads: Iterable[Tensor], writes: Iterable[Tensor]) -> None:
    """Note a kernel with the tensors of the pretend device that it reads and writes."""
    if _watch is None:
        return
    with _watch.lock:
        line, time = line_of(doing), _watch.issue(stream)
        _watch.seen.kernels[doing] += 1
        for tensors, is_write in ((reads, False), (writes, True)):
            for tensor in tensors:
                if tensor.numel():
                    block = memory.allocation_of(tensor)
                    access = access_of(tensor, block.address, stream, time, line)
                    _watch.access(block.number, access, writes=is_write, what="device memory")


def _allocated(block: Allocation) -> None:
    if _watch is not None:
        with _watch.lock:
            _watch.allocate(block)


def _freed(block: Allocation) -> None:
    if _watch is not None:
        with _watch.lock:
            _watch.free(block)


memory.USAGE.allocated, memory.USAGE.freed = _allocated, _freed
