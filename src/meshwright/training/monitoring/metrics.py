"""The run's figures on disk: ``metrics.jsonl`` always, TensorBoard where it is wanted and installed."""

from __future__ import annotations

import importlib.util
import json
import math
import numbers
import time
from collections.abc import Mapping
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Literal

from meshwright.core.errors import ConfigError, IntegrityError, MissingExtraError

if TYPE_CHECKING:
    from torch.utils.tensorboard.writer import SummaryWriter

RESERVED = ("step", "time", "event", "nonfinite")

TensorboardMode = Literal["auto", "on", "off"]


class MetricsWriter:
    """Appends to ``<run_folder>/metrics.jsonl``, and to TensorBoard files in ``<run_folder>/tensorboard``.

    Every line is one JSON object, written whole and flushed at once:

    * figures: ``{"step": 12, "time": 1764000000.123, "loss": 2.25, ...}``. ``step`` counts finished optimizer steps, so the
      first line of a run has step 1; ``time`` is Unix time in seconds.
    * events: ``{"event": "resume", "step": 10, "time": ...}`` and whatever else :meth:`event` is given.
    * a number that JSON cannot hold becomes null, and its kind goes into a flag: ``{"loss": null, "nonfinite": {"loss": "nan"}}``
      (kinds: nan, inf, -inf). Columns stay numeric for readers such as pandas.

    After a crash at step 15 and a resume from step 10, the file holds steps 1 .. 15, the resume event, then 11 onwards;
    :func:`read_metrics` drops the abandoned 11 .. 15, and TensorBoard is told to.

    One rank writes; the others use :class:`SilentMetrics`, which has the same methods.

    Raises:
        ConfigError: ``tensorboard`` is none of auto, on, off.
        MissingExtraError: ``tensorboard="on"`` and the package is not installed.
    """

    def __init__(self, run_folder: str | Path, tensorboard: TensorboardMode = "auto"):
        self.path = Path(run_folder) / "metrics.jsonl"
        self.tensorboard_folder: Path | None = None
        """Where TensorBoard's files are, None where none are written."""
        self.note = ""
        """Why there are no TensorBoard files; empty where there are."""
        self._decide_tensorboard(tensorboard)
        self._board: SummaryWriter | None = None
        self._resumed_at: int | None = None
        self.path.parent.mkdir(parents=True, exist_ok=True)
        _cut_torn_line(self.path)
        self.has_past = self.path.exists() and self.path.stat().st_size > 0
        """Whether the file holds lines of an earlier part of the run."""
        self._file: IO[str] = self.path.open("a", encoding="utf-8")

    def log(self, step: int, values: Mapping[str, object]) -> None:
        """Write the figures of ``step`` (finished optimizer steps). TensorBoard gets the numbers among them.

        Raises:
            ConfigError: a name that the file uses itself, or a value that is no number, text, truth value or None. Tensors
                are refused, because reading one waits for the device: the caller decides when, with ``.item()``.
        """
        self._write({"step": step, "time": _now(), **_encode(values)})
        if self.tensorboard_folder is None:
            return
        board = self._open_board()
        for name, value in values.items():
            if isinstance(value, numbers.Real) and not isinstance(value, bool):
                board.add_scalar(name, float(value), global_step=step)

    def event(self, name: str, *, step: int | None = None, **values: object) -> None:
        """Write something that happens once, such as ``event("startup", imports=1.9, data=0.8)``."""
        at = {} if step is None else {"step": step}
        self._write({"event": name, **at, "time": _now(), **_encode(values)})

    def resumed(self, step: int) -> None:
        """Say that the run goes on from ``step``: lines written before with a higher step belong to an abandoned future."""
        self.event("resume", step=step)
        self._resumed_at = step
        self._close_board()

    def close(self) -> None:
        """Close the files; closing twice is harmless."""
        self._file.close()
        self._close_board()

    def __enter__(self) -> MetricsWriter:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _decide_tensorboard(self, mode: TensorboardMode) -> None:
        check_tensorboard(mode)
        installed = importlib.util.find_spec("tensorboard") is not None
        if mode == "off":
            self.note = "off (tensorboard = 'off')"
        elif not installed:
            self.note = "not written: the package 'tensorboard' is not installed (pip install 'meshwright[track]')"
        else:
            self.tensorboard_folder = self.path.parent / "tensorboard"

    def _open_board(self) -> SummaryWriter:
        if self._board is None:
            # Here and not above: the import takes 0.15 s, and seconds where tensorflow is installed beside it.
            from torch.utils.tensorboard.writer import SummaryWriter

            purge = None if self._resumed_at is None else self._resumed_at + 1
            self._board = SummaryWriter(str(self.tensorboard_folder), purge_step=purge)
        return self._board

    def _close_board(self) -> None:
        if self._board is not None:
            self._board.close()
            self._board = None

    def _write(self, line: dict[str, Any]) -> None:
        self._file.write(json.dumps(line, allow_nan=False) + "\n")
        self._file.flush()


def check_tensorboard(mode: str) -> None:
    """Refuse a mode that cannot be had: before a run folder is made for it.

    Raises:
        ConfigError: ``mode`` is none of auto, on, off.
        MissingExtraError: it is on, and the package is not installed.
    """
    if mode not in ("auto", "on", "off"):
        raise ConfigError(f"logging.tensorboard = {mode!r} is none of auto, on, off")
    if mode == "on" and importlib.util.find_spec("tensorboard") is None:
        raise MissingExtraError("logging.tensorboard = 'on'", "tensorboard", "track")


class SilentMetrics:
    """For ranks that write nothing: the methods of :class:`MetricsWriter`, without effect."""

    path: Path | None = None
    has_past = False
    tensorboard_folder: Path | None = None
    note = ""

    def log(self, step: int, values: Mapping[str, object]) -> None:
        """Nothing."""

    def event(self, name: str, *, step: int | None = None, **values: object) -> None:
        """Nothing."""

    def resumed(self, step: int) -> None:
        """Nothing."""

    def close(self) -> None:
        """Nothing."""

    def __enter__(self) -> SilentMetrics:
        return self

    def __exit__(self, *exc: object) -> None:
        pass


def read_metrics(path: str | Path) -> list[dict[str, Any]]:
    """The lines of a ``metrics.jsonl`` that belong to the run as it went on, in file order, non-finite numbers restored.

    Lines of a step above that of a later resume are left out; events without a step stay. A last line without its
    newline is being written, or was when the machine went down, and is left out.

    Raises:
        IntegrityError: another line is no JSON object.
    """
    lines: list[dict[str, Any]] = []
    *whole, _being_written = Path(path).read_text(encoding="utf-8").split("\n")
    for number, text in enumerate(whole, start=1):
        line = _decode(text, where=f"{path}, line {number}")
        if line.get("event") == "resume":
            lines = [kept for kept in lines if kept.get("step", 0) <= line["step"]]
        lines.append(line)
    return lines


def _encode(values: Mapping[str, object]) -> dict[str, Any]:
    encoded: dict[str, Any] = {}
    nonfinite: dict[str, str] = {}
    for name, value in values.items():
        if name in RESERVED:
            raise ConfigError(f"a metric may not be named '{name}': {', '.join(RESERVED)} are the file's own")
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
                f"metric '{name}' is a {type(value).__name__}: give a number, text, truth value or None (of a tensor, its .item())"
            )
    return {**encoded, "nonfinite": nonfinite} if nonfinite else encoded


def _decode(text: str, where: str) -> dict[str, Any]:
    try:
        line = json.loads(text)
    except json.JSONDecodeError as error:
        raise IntegrityError(
            f"{where}: not JSON ({error.msg}): {text[:80]!r}. Something other than meshwright wrote into this file"
        ) from None
    if not isinstance(line, dict):
        raise IntegrityError(f"{where}: a {type(line).__name__}, where every line is one JSON object")
    for name, kind in line.pop("nonfinite", {}).items():
        line[name] = float(kind)
    return line


def _cut_torn_line(path: Path) -> None:
    """Remove a last line that never got its newline, so that the next line does not grow onto it."""
    if not path.exists():
        return
    with path.open("rb+") as file:
        content = file.read()
        file.truncate(content.rfind(b"\n") + 1)


def _now() -> float:
    return round(time.time(), 3)
