"""Record a few steps and write what was recorded: a profile, or the memory's history."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

from meshwright.core.errors import UnsupportedError

from .windows import read_window


class Recording(Protocol):
    """Begins and ends between two steps, on every rank alike.

    Attributes:
        path: what it writes.
    """

    path: Path

    def start(self) -> None:
        """Begin to record."""
        ...

    def stop(self) -> None:
        """End, and write. Raises OSError where the disk does."""
        ...


class Recordings:
    """The recordings of a run, each with its key, the steps' text and the steps. Without any it costs nothing."""

    def __init__(self, wanted: Sequence[tuple[str, str, range, Recording]] = ()):
        self._wanted = list(wanted)
        self._open: list[tuple[range, Recording]] = []

    def announce(self, step: int, say: Callable[[str], None]) -> None:
        """Say what is not recorded because the run, which goes on from ``step``, is past it."""
        for key, text, window, recording in self._wanted:
            if window[-1] <= step and not recording.path.exists():
                say(f"{key} = {text} lies behind step {step}, from which the run goes on: nothing is recorded")

    def begins_before(self, step: int) -> bool:
        """Tell whether one begins before this step is taken."""
        return bool(self._beginning(step))

    def before(self, step: int) -> None:
        """Call it then."""
        for window, recording in self._beginning(step):
            recording.start()
            self._open.append((window, recording))

    def ends_after(self, step: int) -> bool:
        """Tell whether one ends when this step was taken."""
        return any(step + 1 not in window for window, _ in self._open)

    def after(self, step: int) -> None:
        """Call it then. Raises OSError where the disk does."""
        self._stop([pair for pair in self._open if step + 1 not in pair[0]])

    def close(self) -> None:
        """Write what is still being recorded: the run ends before the window does.

        Raises OSError where the disk does.
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
    """Every allocation and free of CUDA memory on this rank, with stacks, for https://pytorch.org/memory_viz."""

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
    """Refuse what this device cannot give, before the start.

    Raises:
        UnsupportedError: a memory snapshot of a CPU.
    """
    if logging.memory_snapshot and device != "cuda":
        raise UnsupportedError(
            f"logging.memory_snapshot = {logging.memory_snapshot!r}: torch keeps a history of CUDA memory only, and"
            f" this run is on"
            f" {device}. Leave it empty; the line memory_bytes of the metrics tells the memory of each step."
        )


def open_recordings(
    logging: Any, steps: int, folder: Path, rank: int, make_profile: Callable[[Path], Recording]
) -> Recordings:
    """Return the recordings that a config asks for.

    Args:
        logging: the config's section.
        steps: of the whole run.
        folder: the run's.
        make_profile: makes the recording of a profile that is written to a path.
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
