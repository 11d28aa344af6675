"""Record a few steps and write the recording: a profile, or the memory history."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

from meshwright.core.devices import CUDA
from meshwright.core.errors import UnsupportedError

from .windows import read_window


class Recording(Protocol):
    """A recording that starts and stops between two steps, on every rank alike.

    Attributes:
        path: file that it writes.
    """

    path: Path

    def start(self) -> None:
        """Start recording."""
        ...

    def stop(self) -> None:
        """Stop recording and write the file. Raises OSError if the disk does."""
        ...


class Recordings:
    """The recordings of a run, each with its config key, that key's text, and the steps. May be empty at no cost."""

    def __init__(self, wanted: Sequence[tuple[str, str, range, Recording]] = ()):
        self._wanted = list(wanted)
        self._open: list[tuple[range, Recording]] = []

    def announce(self, step: int, say: Callable[[str], None]) -> None:
        """Report the recordings that are skipped because the run continues from ``step``, after their window."""
        for key, text, window, recording in self._wanted:
            if window[-1] <= step and not recording.path.exists():
                say(f"{key} = {text} lies behind step {step}, from which the run goes on: nothing is recorded")

    def begins_before(self, step: int) -> bool:
        """Return whether a recording starts before this step."""
        return bool(self._beginning(step))

    def before(self, step: int) -> None:
        """Start the recordings that begin with this step."""
        for window, recording in self._beginning(step):
            recording.start()
            self._open.append((window, recording))

    def ends_after(self, step: int) -> bool:
        """Return whether a recording stops after this step."""
        return any(step + 1 not in window for window, _ in self._open)

    def after(self, step: int) -> None:
        """Stop the recordings that end with this step. Raises OSError if the disk does."""
        self._stop([pair for pair in self._open if step + 1 not in pair[0]])

    def close(self) -> None:
        """Stop and write the recordings that are still open: the run ends within their window.

        Raises OSError if the disk does.
        """
        self._stop(list(self._open))

    def _beginning(self, step: int) -> list[tuple[range, Recording]]:
        pairs = [(window, recording) for _, _, window, recording in self._wanted if step in window]
        return [pair for pair in pairs if pair not in self._open]

    def _stop(self, over: list[tuple[range, Recording]]) -> None:
        self._open = [pair for pair in self._open if pair not in over]
        for _, recording in over:
            recording.stop()


class MemorySnapshot:
    """Records every allocation and free of CUDA memory on this rank, with stacks, for https://pytorch.org/memory_viz."""

    def __init__(self, path: Path):
        self.path = path

    def start(self) -> None:
        from meshwright.core.torch_private import record_memory_history

        record_memory_history(200_000)

    def stop(self) -> None:
        from meshwright.core.torch_private import dump_memory_history, record_memory_history

        self.path.parent.mkdir(parents=True, exist_ok=True)
        try:
            dump_memory_history(str(self.path))
        finally:
            record_memory_history(None)


def check_recordings(logging: Any, device: str) -> None:
    """Refuse recordings that this device does not support, before the start.

    Raises:
        UnsupportedError: a memory snapshot on a CPU.
    """
    if logging.memory_snapshot and device != CUDA:
        raise UnsupportedError(
            f"logging.memory_snapshot = {logging.memory_snapshot!r}: torch keeps a history of CUDA memory only, and"
            f" this run is on {device}. Leave it empty; memory_bytes in the metrics is the memory of each step."
        )


def open_recordings(
    logging: Any, steps: int, folder: Path, rank: int, make_profile: Callable[[Path], Recording]
) -> Recordings:
    """Return the recordings that a config asks for.

    Args:
        logging: the config's logging section.
        steps: number of steps of the whole run.
        folder: folder of the run.
        make_profile: builds the recording of a profile, given its path.
    """
    wanted: list[tuple[str, str, range, Recording]] = []
    if window := read_window("logging.profile", logging.profile, steps):
        wanted.append(
            ("logging.profile", logging.profile, window, make_profile(folder / "profile" / f"rank{rank}.json"))
        )
    if window := read_window("logging.memory_snapshot", logging.memory_snapshot, steps):
        snapshot = MemorySnapshot(folder / "memory" / f"rank{rank}.pickle")
        wanted.append(("logging.memory_snapshot", logging.memory_snapshot, window, snapshot))
    return Recordings(wanted)
