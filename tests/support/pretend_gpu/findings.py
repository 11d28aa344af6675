"""Say in values and in words what was seen on the device."""

from __future__ import annotations

import linecache
from collections import defaultdict
from dataclasses import dataclass, field

import torch

HOST = -1
"""Number of the host among the streams."""


@dataclass(frozen=True)
class Line:
    """Where something was asked for: a line of Python, or an operation of a backward.

    Attributes:
        file, number: file and line; "" and 0 where autograd ran an operation of its own.
        node: the operation whose backward runs.
        doing: the operator.
    """

    file: str
    number: int
    doing: str
    node: str | None = None

    def __str__(self) -> str:
        at = f"{self.file}:{self.number}" if self.file else "autograd"
        inside = f" in the backward of {self.node}" if self.node else ""
        text = linecache.getline(self.file, self.number).strip() if self.file else ""
        return f"{self.doing} at {at}{inside}" + (f": {text}" if text else "")


@dataclass(frozen=True)
class Access:
    """One read or write of some bytes.

    Attributes:
        stream, time: who, and that stream's count of accesses by then.
        begin, end: bytes from the block's first to behind its last.
        shape: (sizes, strides, bytes of an element), which tell apart tensors whose bytes interleave.
    """

    stream: int
    time: int
    begin: int
    end: int
    shape: tuple[tuple[int, ...], tuple[int, ...], int]
    line: Line

    def meets(self, other: Access) -> bool:
        if self.begin >= other.end or other.begin >= self.end:
            return False
        mine, theirs = self._bytes(), other._bytes()
        return mine is None or theirs is None or not mine.isdisjoint(theirs)

    def _bytes(self) -> set[int] | None:
        """Return the first byte of each element; None where the tensor is dense, or too large to list."""
        sizes, strides, width = self.shape
        number = 1
        for size in sizes:
            number *= size
        if number * width == self.end - self.begin or number > 1_000_000:
            return None
        offsets = torch.zeros(1, dtype=torch.int64)
        for size, stride in zip(sizes, strides, strict=True):
            offsets = (offsets[:, None] + torch.arange(size) * stride).flatten()
        return set((self.begin + offsets * width).tolist())


@dataclass(frozen=True)
class Race:
    """Two accesses to the same bytes on two streams, one of them a write, that nothing orders."""

    first: Access
    second: Access
    what: str

    def __str__(self) -> str:
        names = [("the host" if a.stream == HOST else f"stream {a.stream}") for a in (self.first, self.second)]
        return f"{self.what}: {self.first.line} ({names[0]}) and {self.second.line} ({names[1]}) are not ordered"


@dataclass(frozen=True)
class EarlyFree:
    """Memory that went back to its stream, and was used there, while another stream may still have been at it."""

    access: Access
    reuse: Access

    def __str__(self) -> str:
        return (
            f"memory was freed and used again ({self.reuse.line}, stream {self.reuse.stream}) while stream"
            f" {self.access.stream} may still be at {self.access.line}: call record_stream, or wait for that stream"
            f" before the last reference goes"
        )


@dataclass(frozen=True)
class HostRead:
    """A place where the host waits for the device."""

    why: str
    line: Line

    def __str__(self) -> str:
        return f"{self.why}: {self.line}"


@dataclass(frozen=True)
class CollectiveCall:
    """A message: its operator, the ranks of its group, bytes, and the stream it was issued from.

    Attributes:
        peer: the other rank of a send or a receive.
        batch: number of the ``batch_isend_irecv`` that issued it; 0: none did.
    """

    operator: str
    ranks: tuple[int, ...]
    nbytes: int
    stream: int
    line: Line
    peer: int | None = None
    batch: int = 0


@dataclass
class DeviceTrace:
    """All that was seen while watching.

    Attributes:
        races, early_frees: unordered accesses, and memory that was freed too early.
        host_reads: places where the host waited for the device.
        pageable: copies that were asked to be asynchronous, from or to memory that is not pinned.
        mixtures: operators that were given tensors of two devices.
        messages: collectives in the order in which they were issued.
        kernels: operator -> how often it was launched.
        copies: copies between host and device.
        events: number of events that were recorded.
    """

    races: list[Race] = field(default_factory=list)
    early_frees: list[EarlyFree] = field(default_factory=list)
    host_reads: list[HostRead] = field(default_factory=list)
    pageable: list[Line] = field(default_factory=list)
    mixtures: list[Line] = field(default_factory=list)
    messages: list[CollectiveCall] = field(default_factory=list)
    kernels: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    copies: int = 0
    events: int = 0

    @property
    def launches(self) -> int:
        """Number of kernels."""
        return sum(self.kernels.values())

    def faults(self) -> list[str]:
        """List what no sound program does, in words: races, early frees, pageable copies, mixtures."""
        return [
            *map(str, self.races),
            *map(str, self.early_frees),
            *(f"asynchronous copy of pageable memory: {line}" for line in self.pageable),
            *(f"tensors of two devices: {line}" for line in self.mixtures),
        ]
