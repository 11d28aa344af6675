"""Write a run's figures to ``metrics.jsonl``, the source of every other view, and to trackers, by one interface."""

from __future__ import annotations

import importlib
import importlib.util
import json
import math
import numbers
import re
import secrets
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Protocol

from meshwright.core.errors import ConfigError, IntegrityError, MeshwrightError, MissingExtraError, install_command

if TYPE_CHECKING:
    from torch.utils.tensorboard.writer import SummaryWriter

NAME = "metrics.jsonl"
WANDB_FILE = "wandb.json"
MODES = {"tensorboard": ("auto", "on", "off"), "wandb": ("off", "online", "offline")}
RESERVED = ("step", "time", "event", "nonfinite")


class Tracker(Protocol):
    """A destination of a run's figures. One rank has trackers; a step is a number of finished optimizer steps."""

    def log(self, step: int, values: Mapping[str, object]) -> None:
        """Store the figures of a step; steps rise between two calls of ``resumed``."""
        ...

    def event(self, name: str, values: Mapping[str, object], step: int | None = None) -> None:
        """Store an event that happens once, such as ``event("startup", {"imports": 1.9, "data": 0.8})``."""
        ...

    def resumed(self, step: int) -> None:
        """Record that the run continues from ``step``: stored figures of higher steps are abandoned."""
        ...

    def close(self) -> None:
        """Write pending figures; closing twice is harmless."""
        ...


# --- write a run's figures to ``metrics.jsonl``, and read them


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

    Attributes:
        has_past: whether the file holds lines of an earlier part of the run.
    """

    def __init__(self, run_folder: str | Path):
        self.path = Path(run_folder) / NAME
        self.path.parent.mkdir(parents=True, exist_ok=True)
        if self.path.exists():
            with self.path.open("rb+") as file:  # without a torn last line, to which the next would be appended
                file.truncate(file.read().rfind(b"\n") + 1)
        self.has_past = self.path.exists() and self.path.stat().st_size > 0
        self._file: IO[str] = self.path.open("a", encoding="utf-8")

    def log(self, step: int, values: Mapping[str, object]) -> None:
        """Write the figures of ``step`` (finished optimizer steps).

        Raises:
            ConfigError: a reserved name, or a value that is not a number, text, truth value or None. Tensors are
                refused, because reading one waits for the device: the caller decides when, with ``.item()``.
        """
        self._write({"step": step}, values)

    def event(self, name: str, values: Mapping[str, object], step: int | None = None) -> None:
        self._write({"event": name, **({} if step is None else {"step": step})}, values)

    def resumed(self, step: int) -> None:
        self.event("resume", {}, step)

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> MetricsWriter:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _write(self, head: dict[str, Any], values: Mapping[str, object]) -> None:
        encoded: dict[str, Any] = {**head, "time": _now()}
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
                    f"metric '{name}' is a {type(value).__name__}: give a number, text, truth value or None (for a"
                    f" tensor, its .item())"
                )
        line = {**encoded, "nonfinite": nonfinite} if nonfinite else encoded
        self._file.write(json.dumps(line, allow_nan=False) + "\n")
        self._file.flush()


def _now() -> float:
    return round(time.time(), 3)


def metric_lines(path: str | Path) -> Iterator[dict[str, Any]]:
    """Yield the lines of a ``metrics.jsonl``, one at a time, non-finite numbers restored.

    Abandoned lines (of steps that a resume repeats) are included. A last line without its newline is left out: it is
    being written, or was when the machine went down.

    Raises:
        IntegrityError: another line is not a JSON object, or was not written by meshwright.
    """
    foreign = "Something other than meshwright wrote into this file"
    with open(path, encoding="utf-8", errors="replace", newline="\n") as file:
        for number, text in enumerate(file, start=1):
            if not text.endswith("\n"):
                return
            where = f"{path}, line {number}"
            try:
                line = json.loads(text)
            except (ValueError, RecursionError) as error:
                why = getattr(error, "msg", error)
                raise IntegrityError(f"{where}: not JSON ({why}): {text[:-1][:80]!r}. {foreign}") from None
            if not isinstance(line, dict):
                raise IntegrityError(f"{where}: a {type(line).__name__}, where every line is one JSON object")
            kinds, step = line.pop("nonfinite", {}), line.get("step")
            has_step = "step" in line or line.get("event") == "resume"
            if has_step and (not isinstance(step, int) or isinstance(step, bool)):
                raise IntegrityError(f'{where}: "step" is {str(step)[:40]!r}, where it is a whole number. {foreign}')
            if not isinstance(kinds, dict) or not all(kind in ("nan", "inf", "-inf") for kind in kinds.values()):
                raise IntegrityError(
                    f'{where}: "nonfinite" is {str(kinds)[:80]!r}; it must map names to nan, inf or -inf. {foreign}'
                )
            yield line | {name: float(kind) for name, kind in kinds.items()}


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


# --- send figures to TensorBoard, and to Weights & Biases


class TensorBoard:
    """The tracker that writes a run's numeric figures, but no events, to ``<run_folder>/tensorboard``.

    After a resume TensorBoard purges the later steps.
    """

    def __init__(self, run_folder: str | Path):
        self.folder = Path(run_folder) / "tensorboard"
        self._writer: SummaryWriter | None = None
        self._purge: int | None = None

    def log(self, step: int, values: Mapping[str, object]) -> None:
        if self._writer is None:
            # Here and not above: the import takes 0.15 s, and seconds where tensorflow is installed beside it.
            from torch.utils.tensorboard.writer import SummaryWriter

            self._writer = SummaryWriter(str(self.folder), purge_step=self._purge)
        for name, value in values.items():
            if isinstance(value, numbers.Real) and not isinstance(value, bool):
                self._writer.add_scalar(name, float(value), global_step=step)

    def event(self, name: str, values: Mapping[str, object], step: int | None = None) -> None:
        """Do nothing."""

    def resumed(self, step: int) -> None:
        self.close()
        self._purge = step + 1

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None


class WeightsAndBiases:
    """The tracker of one W&B run, whose id is stored in ``<run_folder>/wandb.json`` and reused when the run continues.

    W&B accepts steps in rising order only and deletes none. So the furthest step that was sent is stored beside the
    id, and a step that is repeated after a resume is not sent again: W&B has each step once, as first taken.

    Args:
        run_folder: W&B's own files go into ``wandb/`` below it.
        mode: "online" or "offline".
        project: W&B's word for a collection of runs.
        facts: the config, shown beside the figures.
        say: called once when W&B no longer accepts figures; they stay in ``metrics.jsonl``, and the run continues.

    Attributes:
        place: where the figures are, as shown to the user.

    Raises:
        MeshwrightError: W&B refuses, or cannot be reached.
        IntegrityError: ``wandb.json`` was changed.
    """

    def __init__(
        self, run_folder: str | Path, mode: str, project: str, facts: Mapping[str, Any], say: Callable[[str], None]
    ):
        self._path, self._say = Path(run_folder) / WANDB_FILE, say
        self._id, self._furthest = secrets.token_hex(4), 0
        if self._path.is_file():
            try:
                stored = json.loads(self._path.read_text())
                self._id, self._furthest = stored["id"], stored["furthest"]
            except (ValueError, KeyError, TypeError) as error:
                raise IntegrityError(
                    f"{self._path} is not what meshwright wrote ({error}); remove it to begin a new W&B run"
                ) from None
        is_id = isinstance(self._id, str) and re.fullmatch(r"[A-Za-z0-9_-]{1,64}", self._id)
        if not (is_id and type(self._furthest) is int):
            raise IntegrityError(f"{self._path} holds no valid id and step of a W&B run; remove it to begin a new one")
        wandb, name = importlib.import_module("wandb"), Path(run_folder).absolute().name
        options: dict[str, Any] = {"mode": mode, "dir": str(run_folder), "config": dict(facts), "reinit": "create_new"}
        if mode == "online":
            options["resume"] = "allow"  # offline it would only cause a warning: the id alone makes it the same run
        try:
            settings = wandb.Settings(console="off", silent=True)
            self._run: Any = wandb.init(id=self._id, project=project, name=name, settings=settings, **options)
        except (wandb.errors.Error, OSError, ValueError) as error:
            reason = " ".join(str(error).split())
            raise MeshwrightError(
                f"logging.wandb = '{mode}': Weights & Biases refused ({type(error).__name__}: {reason}). Log in with:"
                f" wandb login;"
                f' or set logging.wandb = "offline" and send the files later with: wandb sync'
            ) from error
        self._keep()
        files = Path(run_folder) / "wandb" / "offline-run-*"
        self.place = f"wandb  (wandb sync --id {self._id} {files})" if mode == "offline" else str(self._run.url)

    def log(self, step: int, values: Mapping[str, object]) -> None:
        if step > self._furthest:
            self._furthest = step
            self._keep()  # before it is sent: after a crash W&B may lack a step, but never receives one twice
            self._send(lambda: self._run.log(dict(values), step=step))

    def event(self, name: str, values: Mapping[str, object], step: int | None = None) -> None:
        """Store an event in the run's summary: a step of its own would break the order."""
        at = {} if step is None else {f"{name}/step": step}
        self._send(lambda: self._run.summary.update(at | {f"{name}/{key}": value for key, value in values.items()}))

    def resumed(self, step: int) -> None:
        self.event("resume", {}, step)
        if step < self._furthest:
            span = f"{step + 1} to {self._furthest}" if step + 1 < self._furthest else str(self._furthest)
            self._say(
                f"wandb: steps {span} are taken again; W&B keeps them as they were taken first (it forgets no step)"
            )

    def close(self) -> None:
        self._send(lambda: self._run.finish())
        self._run = None

    def _keep(self) -> None:
        temporary = self._path.with_name(WANDB_FILE + ".new")
        temporary.write_text(json.dumps({"id": self._id, "furthest": self._furthest}))
        temporary.replace(self._path)

    def _send(self, action: Callable[[], object]) -> None:
        """Run an action unless W&B was lost, which was reported then; the figures are in the metrics file."""
        if self._run is None:
            return
        try:
            action()
        except Exception as error:  # noqa: BLE001  (training continues whatever error a remote client raises)
            self._run = None
            self._say(
                f"wandb takes no more figures ({type(error).__name__}: {error}); they are in metrics.jsonl, and the"
                f" run goes on"
            )


# --- open the trackers that a config asks for, as one


class Trackers:
    """Several trackers as one, in order; empty on ranks that write nothing, so that callers need no ``if rank == 0``.

    Each call raises OSError if the disk does, and ConfigError for an unsupported value.

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
        for tracker in self._trackers:
            tracker.log(step, values)

    def event(self, name: str, values: Mapping[str, object], step: int | None = None) -> None:
        for tracker in self._trackers:
            tracker.event(name, values, step)

    def resumed(self, step: int) -> None:
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
        ConfigError: a mode that is none.
        MissingExtraError: a requested tracker is not installed.
    """
    for key, modes in MODES.items():
        if (mode := getattr(logging, key)) not in modes:
            raise ConfigError(f"logging.{key} = {mode!r} is none of {', '.join(modes)}")
        if mode not in ("auto", "off") and importlib.util.find_spec(key) is None:
            raise MissingExtraError(f"logging.{key} = '{mode}'", key, "track")


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
    check_trackers(logging)
    file = MetricsWriter(folder)
    found: list[Tracker] = [file]
    places = [("metrics", file.path.name)]
    try:
        if logging.tensorboard == "off":
            places.append(("tensorboard", "off (tensorboard = 'off')"))
        elif importlib.util.find_spec("tensorboard") is None:
            why = f"the package 'tensorboard' is not installed ({install_command('tensorboard')})"
            places.append(("tensorboard", f"not written: {why}"))
        else:
            found.append(written := TensorBoard(folder))
            places.append(("tensorboard", f"{written.folder.name}  (tensorboard --logdir {written.folder})"))
        if logging.wandb != "off":
            remote = WeightsAndBiases(folder, logging.wandb, logging.wandb_project or name, facts, say)
            found.append(remote)
            places.append(("wandb", remote.place))
    except BaseException:
        Trackers(found).close()
        raise
    return Trackers(found, has_past=file.has_past, places=places)
