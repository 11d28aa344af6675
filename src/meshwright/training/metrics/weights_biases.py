"""Send a run's figures to Weights & Biases, or into files that ``wandb sync`` sends."""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import re
import secrets
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from meshwright.core.errors import ConfigError, IntegrityError, MeshwrightError, MissingExtraError

NAME = "wandb.json"
MODES = ("off", "online", "offline")


def check(mode: str) -> None:
    """Refuse a mode that is unknown or unavailable.

    Raises:
        ConfigError: ``mode`` is none of off, online, offline.
        MissingExtraError: ``mode`` is not off, and the package is not installed.
    """
    if mode not in MODES:
        raise ConfigError(f"logging.wandb = {mode!r} is none of {', '.join(MODES)}")
    if mode != "off" and importlib.util.find_spec("wandb") is None:
        raise MissingExtraError(f"logging.wandb = '{mode}'", "wandb", "track")


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

    Raises:
        MissingExtraError: the package is not installed.
        MeshwrightError: W&B refuses, or cannot be reached.
        IntegrityError: ``wandb.json`` was changed.
    """

    def __init__(
        self, run_folder: str | Path, mode: str, project: str, facts: Mapping[str, Any], say: Callable[[str], None]
    ):
        check(mode)
        self._wandb = importlib.import_module("wandb")
        self._path = Path(run_folder) / NAME
        self._say = say
        self._id, self._furthest = _read(self._path)
        wandb, name = self._wandb, Path(run_folder).absolute().name
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
        """The place of the figures, as shown to the user."""

    def log(self, step: int, values: Mapping[str, object]) -> None:
        if step > self._furthest:
            self._furthest = step
            self._keep()
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
        """Store the step before it is sent: after a crash W&B may lack a step, but never receives one twice."""
        temporary = self._path.with_name(NAME + ".new")
        temporary.write_text(json.dumps({"id": self._id, "furthest": self._furthest}))
        os.replace(temporary, self._path)

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


def _read(path: Path) -> tuple[str, int]:
    """Return (id, furthest step) of the run so far; a new id without a file."""
    if not path.is_file():
        return secrets.token_hex(4), 0
    try:
        stored = json.loads(path.read_text())
        known, furthest = stored["id"], stored["furthest"]
    except (ValueError, KeyError, TypeError) as error:
        raise IntegrityError(
            f"{path} is not what meshwright wrote ({error}); remove it to begin a new W&B run"
        ) from None
    if not (isinstance(known, str) and re.fullmatch(r"[A-Za-z0-9_-]{1,64}", known) and type(furthest) is int):
        raise IntegrityError(f"{path} holds no valid id and step of a W&B run; remove it to begin a new one")
    return known, furthest
