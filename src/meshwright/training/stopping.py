"""Signals that end a run cleanly: noted here, agreed by all ranks at the end of a step."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)


class StopRequest:
    """Notes the first of INT, TERM and USR1; a second INT interrupts at once. Use it as a context."""

    def __init__(self) -> None:
        self.signal = 0
        self._before: dict[int, object] = {}

    def __enter__(self) -> StopRequest:
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._note) for number in SIGNALS}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]

    @contextmanager
    def released(self) -> Iterator[None]:
        """In here a signal ends the process, as it would without us: nothing can be agreed before the ranks have met."""
        for number in self._before:
            signal.signal(number, signal.SIG_DFL)
        try:
            yield
        finally:
            for number in self._before:
                signal.signal(number, self._note)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.signal and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.signal = self.signal or number
