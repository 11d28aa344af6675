"""Streams and events of the pretend device: kernels run at once, and who waits for whom is noted (``timeline``)."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from typing import Any

import torch

from . import memory, timeline
from .findings import HOST
from .names import DEVICE_TYPE

DEFAULT = 0
"""Number of the default stream."""
PRIVATE_USE = 20
"""torch's number of the device type of extensions (``c10::DeviceType::PrivateUse1``)."""
_numbers = count(1)


class DeviceStream(torch.Stream):
    """A queue of kernels on the pretend device."""

    def __new__(cls, device: Any = None, priority: int = 0, *, number: int | None = None, **_: Any) -> DeviceStream:
        number = next(_numbers) if number is None else number
        return super().__new__(cls, stream_id=number, device_index=0, device_type=PRIVATE_USE)

    def __init__(self, *_: Any, **__: Any) -> None:
        self.number = self.stream_id

    def wait_stream(self, other: torch.Stream) -> None:
        timeline.wait(self.number, timeline.clock_of(other.stream_id))

    def wait_event(self, event: torch.Event) -> None:
        event.wait(self)

    def record_event(self, event: torch.Event | None = None) -> torch.Event:
        event = DeviceEvent() if event is None else event
        event.record(self)
        return event

    def synchronize(self) -> None:
        timeline.host_waits(timeline.clock_of(self.number), "stream.synchronize()")

    def query(self) -> bool:
        timeline.wait(HOST, timeline.clock_of(self.number))
        return True  # kernels run at once; asking does not wait

    def __enter__(self) -> DeviceStream:
        _stack().append(self)
        return self

    def __exit__(self, *_: object) -> None:
        _stack().pop()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, torch.Stream) and other.stream_id == self.stream_id

    def __hash__(self) -> int:
        return hash(self.stream_id)


class DeviceEvent(torch.Event):
    """A point of a stream; before it is recorded, waiting for it does nothing, as on CUDA."""

    def __new__(cls, *_: Any, **__: Any) -> DeviceEvent:
        return super().__new__(cls, torch.device(DEVICE_TYPE, 0))

    def __init__(self, *_: Any, **__: Any) -> None:
        self._clock: timeline.Clock | None = None
        self.recorded = 0.0

    def record(self, stream: torch.Stream | None = None) -> None:
        self._clock = dict(timeline.clock_of((stream or current_stream()).stream_id))
        self.recorded = time.perf_counter()
        timeline.count_event()

    def wait(self, stream: torch.Stream | None = None) -> None:
        if self._clock is not None:
            timeline.wait((stream or current_stream()).stream_id, self._clock)

    def synchronize(self) -> None:
        timeline.host_waits(self._clock or {}, "event.synchronize()")

    def query(self) -> bool:
        timeline.wait(HOST, self._clock or {})
        return True

    def elapsed_time(self, other: torch.Event) -> float:
        """Return milliseconds between the two records, by the host's clock."""
        return 1000 * (other.recorded - self.recorded)  # pyright: ignore[reportAttributeAccessIssue]


_default: torch.Stream = DeviceStream(number=DEFAULT)
_own = threading.local()


def _stack() -> list[torch.Stream]:
    if not hasattr(_own, "stack"):
        _own.stack = [_default]
    stack: list[torch.Stream] = _own.stack
    return stack


def current_stream(device: Any = None) -> torch.Stream:
    return _stack()[-1]


def default_stream(device: Any = None) -> torch.Stream:
    return _default


def set_stream(stream: torch.Stream) -> None:
    _stack()[-1] = stream


@contextmanager
def stream(chosen: torch.Stream | None) -> Iterator[torch.Stream | None]:
    """Run what is inside on a stream; None: on the current one."""
    _stack().append(chosen or current_stream())
    try:
        yield chosen
    finally:
        _stack().pop()


memory.USAGE.current_stream = lambda: _stack()[-1].stream_id
