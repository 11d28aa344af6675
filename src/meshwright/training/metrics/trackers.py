"""Send a run's figures to a file, TensorBoard and Weights & Biases through one interface."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Protocol

from . import board, weights_biases
from .metrics import MetricsWriter


class Tracker(Protocol):
    """A destination of a run's figures. One rank has trackers; a step is a number of finished optimizer steps."""

    def log(self, step: int, values: Mapping[str, object]) -> None:
        """Store the figures of a step; steps rise between two calls of ``resumed``."""
        ...

    def event(self, name: str, values: Mapping[str, object], step: int | None = None) -> None:
        """Store an event that happens once."""
        ...

    def resumed(self, step: int) -> None:
        """Record that the run continues from ``step``: stored figures of higher steps are abandoned."""
        ...

    def close(self) -> None:
        """Write pending figures; closing twice is harmless."""
        ...


class Trackers:
    """Several trackers as one, in order; empty on ranks that write nothing, so that callers need no ``if rank == 0``.

    Attributes:
        has_past: whether figures of an earlier part of the run exist.
        places: (name, place of its figures in the run folder or the reason for their absence) of each tracker.
    """

    def __init__(
        self, trackers: Sequence[Tracker] = (), *, has_past: bool = False, places: Sequence[tuple[str, str]] = ()
    ):
        self._trackers = list(trackers)
        self.has_past, self.places = has_past, list(places)

    def log(self, step: int, values: Mapping[str, object]) -> None:
        """Store figures in all trackers. Raises OSError if the disk does, ConfigError for an unsupported value."""
        for tracker in self._trackers:
            tracker.log(step, values)

    def event(self, name: str, values: Mapping[str, object], step: int | None = None) -> None:
        """Store an event in all trackers. Raises as ``log``."""
        for tracker in self._trackers:
            tracker.event(name, values, step)

    def resumed(self, step: int) -> None:
        """Record in all trackers that the run continues from ``step``. Raises as ``log``."""
        for tracker in self._trackers:
            tracker.resumed(step)

    def close(self) -> None:
        """Close all of them, also when one raises."""
        with ExitStack() as stack:
            for tracker in reversed(self._trackers):
                stack.callback(tracker.close)


def check_trackers(logging: Any) -> None:
    """Refuse unavailable trackers, before a run folder is created.

    Raises:
        MissingExtraError: a requested tracker is not installed.
    """
    board.check(logging.tensorboard)
    weights_biases.check(logging.wandb)


def open_trackers(
    folder: Path, logging: Any, name: str, facts: Mapping[str, Any], say: Callable[[str], None]
) -> Trackers:
    """Open the trackers that a config requests. Call it on the rank that writes figures.

    Args:
        folder: folder of the run; all trackers write below it.
        logging: the config's logging section.
        name: name of the run.
        facts: the config as nested dicts, for trackers that show it.
        say: called with a message when a tracker stops accepting figures.

    Raises:
        MissingExtraError: a tracker is not installed.
        MeshwrightError: Weights & Biases cannot be reached.
    """
    file = MetricsWriter(folder)
    found: list[Tracker] = [file]
    places = [("metrics", file.path.name)]
    try:
        if note := board.why_not(logging.tensorboard):
            places.append(("tensorboard", note))
        else:
            found.append(written := board.TensorBoard(folder))
            places.append(("tensorboard", f"{written.folder.name}  (tensorboard --logdir {written.folder})"))
        if logging.wandb != "off":
            found.append(
                remote := weights_biases.WeightsAndBiases(
                    folder, logging.wandb, logging.wandb_project or name, facts, say
                )
            )
            places.append(("wandb", remote.place))
    except BaseException:
        Trackers(found).close()
        raise
    return Trackers(found, has_past=file.has_past, places=places)
