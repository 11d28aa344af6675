"""Write a run's figures to ``metrics.jsonl``, the source of every other view, and to trackers, by one interface."""

from __future__ import annotations

import json
import math
import numbers
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import IO, Any, Protocol

from meshwright.core.errors import ConfigError, IntegrityError

from . import board, weights_biases

# --- write a run's figures to ``metrics.jsonl``, the source of every other view

NAME = "metrics.jsonl"
RESERVED = ("step", "time", "event", "nonfinite")


class MetricsWriter:
    """The tracker that appends to ``<run_folder>/metrics.jsonl``.

    Every line is one JSON object, written whole and flushed at once:

    * figures: ``{"step": 12, "time": 1764000000.123, "loss": 2.25, ...}``. ``step`` counts finished optimizer steps,
      so the first line of a run has step 1; ``time`` is Unix time in seconds.
    * events: ``{"event": "resume", "step": 10, "time": ...}`` and whatever else :meth:`event` is given.
    * a number that JSON cannot hold becomes null, and its kind goes into a flag: ``{"loss": null, "nonfinite":
      {"loss": "nan"}}`` (kinds: nan, inf, -inf). Columns stay numeric for readers such as pandas.

    After a crash at step 15 and a resume from step 10, the file holds steps 1 .. 15, the resume event, then 11 onwards;
    :func:`read_metrics` drops the abandoned 11 .. 15.
    """

    def __init__(self, run_folder: str | Path):
        self.path = Path(run_folder) / NAME
        self.path.parent.mkdir(parents=True, exist_ok=True)
        _cut_torn_line(self.path)
        self.has_past = self.path.exists() and self.path.stat().st_size > 0
        """Whether the file holds lines of an earlier part of the run."""
        self._file: IO[str] = self.path.open("a", encoding="utf-8")

    def log(self, step: int, values: Mapping[str, object]) -> None:
        """Write the figures of ``step`` (finished optimizer steps).

        Raises:
            ConfigError: a reserved name, or a value that is not a number, text, truth value or None. Tensors are
                refused, because reading one waits for the device: the caller decides when, with ``.item()``.
        """
        self._write({"step": step, "time": _now(), **_encode(values)})

    def event(self, name: str, values: Mapping[str, object], step: int | None = None) -> None:
        """Write an event that happens once, such as ``event("startup", {"imports": 1.9, "data": 0.8})``."""
        at = {} if step is None else {"step": step}
        self._write({"event": name, **at, "time": _now(), **_encode(values)})

    def resumed(self, step: int) -> None:
        """Record that the run continues from ``step``: earlier lines of higher steps are abandoned."""
        self.event("resume", {}, step)

    def close(self) -> None:
        """Close the file; closing twice is harmless."""
        self._file.close()

    def __enter__(self) -> MetricsWriter:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _write(self, line: dict[str, Any]) -> None:
        self._file.write(json.dumps(line, allow_nan=False) + "\n")
        self._file.flush()


def metric_lines(path: str | Path) -> Iterator[dict[str, Any]]:
    """Yield the lines of a ``metrics.jsonl``, one at a time, non-finite numbers restored.

    Abandoned lines (of steps that a resume repeats) are included.

    A last line without its newline is left out: it is being written, or was when the machine went down.

    Raises:
        IntegrityError: another line is not a JSON object, or was not written by meshwright.
    """
    with open(path, encoding="utf-8", errors="replace", newline="\n") as file:
        for number, text in enumerate(file, start=1):
            if text.endswith("\n"):
                yield _decode(text[:-1], where=f"{path}, line {number}")


def read_metrics(path: str | Path) -> list[dict[str, Any]]:
    """Return the lines of a ``metrics.jsonl`` without abandoned ones, in file order.

    Lines of a step above that of a later resume are left out; events without a step stay.

    Raises:
        IntegrityError: as ``metric_lines``.
    """
    lines: list[dict[str, Any]] = []
    for line in metric_lines(path):
        if line.get("event") == "resume":
            lines = [kept for kept in lines if kept.get("step", 0) <= line["step"]]
        lines.append(line)
    return lines


def _encode(values: Mapping[str, object]) -> dict[str, Any]:
    encoded: dict[str, Any] = {}
    nonfinite: dict[str, str] = {}
    for name, value in values.items():
        if name in RESERVED:
            raise ConfigError(f"a metric may not be named '{name}': {', '.join(RESERVED)} are reserved")
        if value is None or isinstance(value, str | bool | int):
            encoded[name] = value
        elif isinstance(value, numbers.Integral):
            encoded[name] = int(value)
        elif isinstance(value, numbers.Real):
            number = float(value)
            encoded[name] = number if math.isfinite(number) else None
            if not math.isfinite(number):
                nonfinite[name] = str(number)
        else:
            raise ConfigError(
                f"metric '{name}' is a {type(value).__name__}: give a number, text, truth value or None (for a tensor,"
                f" its .item())"
            )
    return {**encoded, "nonfinite": nonfinite} if nonfinite else encoded


def _decode(text: str, where: str) -> dict[str, Any]:
    foreign = "Something other than meshwright wrote into this file"
    try:
        line = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise IntegrityError(f"{where}: not JSON ({getattr(error, 'msg', error)}): {text[:80]!r}. {foreign}") from None
    if not isinstance(line, dict):
        raise IntegrityError(f"{where}: a {type(line).__name__}, where every line is one JSON object")
    kinds = line.pop("nonfinite", {})
    is_resume = line.get("event") == "resume"
    if ("step" in line or is_resume) and not (isinstance(step := line.get("step"), int) and not isinstance(step, bool)):
        raise IntegrityError(f'{where}: "step" is {str(step)[:40]!r}, where it is a whole number. {foreign}')
    if not isinstance(kinds, dict) or not all(kind in ("nan", "inf", "-inf") for kind in kinds.values()):
        raise IntegrityError(
            f'{where}: "nonfinite" is {str(kinds)[:80]!r}; it must map names to nan, inf or -inf. {foreign}'
        )
    return line | {name: float(kind) for name, kind in kinds.items()}


def _cut_torn_line(path: Path) -> None:
    """Remove a last line without its newline, so that the next line is not appended to it."""
    if not path.exists():
        return
    with path.open("rb+") as file:
        content = file.read()
        file.truncate(content.rfind(b"\n") + 1)


def _now() -> float:
    return round(time.time(), 3)


# --- send a run's figures to a file, TensorBoard and Weights & Biases through one interface


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
