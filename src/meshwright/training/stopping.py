"""Record signals that end a run cleanly; the ranks agree to stop at the end of a step."""

from __future__ import annotations

import os
import signal
import stat
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from meshwright.core.errors import MeshwrightError
from meshwright.distributed.process.workers import meeting_place
from meshwright.training.views.progress import Progress

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
INTERRUPT = signal.SIGUSR2
"""The signal by which the launcher forwards an INT to its workers: another INT would count as the second one if a
terminal has sent the first to all processes."""


class Interrupted(MeshwrightError):
    """An error for a signal that interrupted the preparation, on every rank; ``number`` is the signal's."""

    def __init__(self, number: int):
        super().__init__(number)
        self.number = number


def answered() -> tuple[int, ...]:
    """Return the signals that end a run cleanly, except a hang-up that the process ignores (``nohup``)."""
    return tuple(number for number in SIGNALS if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN)


def leave_terminal(number: int) -> None:
    """Redirect output to ``os.devnull`` if a hang-up closed the terminal: a write to it would interrupt the save."""
    if number != signal.SIGHUP:
        return
    for out in (1, 2):
        if stat.S_ISCHR(os.fstat(out).st_mode) and not os.isatty(out):
            os.dup2(os.open(os.devnull, os.O_WRONLY), out)


class StopRequest:
    """A context that records the first INT, TERM, HUP or USR1; a second INT interrupts at once.

    In a worker of our launcher USR2 counts as INT.
    """

    def __init__(self) -> None:
        self.signal = 0
        self._before: dict[int, object] = {}

    def __enter__(self) -> StopRequest:
        if threading.current_thread() is threading.main_thread():
            numbers = answered() if meeting_place() is None else (*answered(), INTERRUPT)
            self._before = {number: signal.signal(number, self._note) for number in numbers}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]

    @contextmanager
    def released(self) -> Iterator[None]:
        """Let signals end the process by default: ranks cannot agree before the process group exists.

        Raises:
            Interrupted: a signal arrived earlier, and our launcher does not watch the ranks: one of them may have died
                of the signal, and the others would wait for it. The launcher ends all ranks when one is lost.
        """
        for number in self._before:
            signal.signal(number, signal.SIG_DFL)
        try:
            if self.signal and meeting_place() is None:
                raise Interrupted(self.signal)
            yield
        finally:
            for number in self._before:
                signal.signal(number, self._note)

    def breaks(self, progress: Progress) -> Progress:
        """Wrap a progress so that its ``portion`` raises Interrupted after a signal, since reading a large corpus takes
        long. Pass it to collective actions only, so that all ranks raise.
        """
        return _Breaking(progress, self)  # type: ignore[return-value]

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.signal and number == signal.SIGINT:
            raise KeyboardInterrupt
        leave_terminal(number)
        self.signal = self.signal or (signal.SIGINT if number == INTERRUPT else number)


class _Breaking:
    def __init__(self, progress: Progress, stop: StopRequest):
        self._progress, self._stop = progress, stop

    def portion(self, what: str, done: int, total: int) -> None:
        if self._stop.signal:
            raise Interrupted(self._stop.signal)
        self._progress.portion(what, done, total)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._progress, name)
