"""Send a run's figures to a file, TensorBoard and Weights & Biases through one interface."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Protocol

from . import board, weights_biases
from .metrics import MetricsWriter


class Tracker(Protocol):
    """A tracker of the figures of a run. One rank has trackers; a step is a number of finished optimizer steps."""

    def log(self, step: int, values: Mapping[str, object]) -> None:
        """Keep the figures of a step; steps rise between two calls of ``resumed``."""
        ...

    def event(self, name: str, values: Mapping[str, object], step: int | None = None) -> None:
        """Keep something that happens once."""
        ...

    def resumed(self, step: int) -> None:
        """The run goes on from ``step``: what was kept of higher steps belongs to an abandoned future."""
        ...

    def close(self) -> None:
        """Write what is left; closing twice is harmless."""
        ...


class Trackers:
    """Several trackers as one, in order; none on ranks that keep nothing, so that callers need no ``if rank == 0``.

    Attributes:
        has_past: whether figures of an earlier part of the run are there.
        places: (name, where in the run folder its figures are, or why there are none) of each, for people.
    """

    def __init__(
        self, trackers: Sequence[Tracker] = (), *, has_past: bool = False, places: Sequence[tuple[str, str]] = ()
    ):
        self._trackers = list(trackers)
        self.has_past, self.places = has_past, list(places)

    def log(self, step: int, values: Mapping[str, object]) -> None:
        """Raises OSError where the disk does, ConfigError for a value that is no figure."""
        for tracker in self._trackers:
            tracker.log(step, values)

    def event(self, name: str, values: Mapping[str, object], step: int | None = None) -> None:
        """Raise as ``log`` does."""
        for tracker in self._trackers:
            tracker.event(name, values, step)

    def resumed(self, step: int) -> None:
        """Raise as ``log`` does."""
        for tracker in self._trackers:
            tracker.resumed(step)

    def close(self) -> None:
        """Close all of them, also when one raises."""
        with ExitStack() as stack:
            for tracker in reversed(self._trackers):
                stack.callback(tracker.close)


def check_trackers(logging: Any) -> None:
    """Refuse what cannot be had, before a run folder is made for it.

    Raises:
        MissingExtraError: a tracker that is asked for is not installed.
    """
    board.check(logging.tensorboard)
    weights_biases.check(logging.wandb)


def open_trackers(
    folder: Path, logging: Any, name: str, facts: Mapping[str, Any], say: Callable[[str], None]
) -> Trackers:
    """Return the trackers that a config asks for. Call it on the rank that keeps figures.

    Args:
        folder: the run's; all of them write below it.
        logging: the config's section.
        name: the run's.
        facts: the config as nested dicts, for trackers that show it.
        say: told when a tracker stops to take figures.

    Raises:
        MissingExtraError: one is not installed.
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
