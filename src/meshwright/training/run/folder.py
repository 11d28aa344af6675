"""Find a run's folder, check that it holds the same run, and write the paths of its data as absolute ones."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from meshwright.checkpoint.folder import CheckpointFolder
from meshwright.core.config import to_toml
from meshwright.core.errors import ConfigError
from meshwright.core.files import read_object, replace_text
from meshwright.data import SourceOptions, Tokenizer
from meshwright.data.scan import resolved
from meshwright.data.tokenizers import BYTES
from meshwright.training.config import Config, DataConfig
from meshwright.training.model_source import keep_model
from meshwright.training.slurm import FOLDER, job_number, note_job, run_of_requeued_job
from meshwright.training.tokenizer import keep_tokenizer, template_file

from .occupancy import NAME
from .request import IDENTITY

# --- write the paths of a run's data as absolute ones, so that it can be continued from any folder


def absolute_paths(data: DataConfig) -> dict[str, Any]:
    """Return the data section's paths as absolute ones, so that a run can be continued from any folder."""

    def absolute(path: str) -> str:
        return str(Path(path).expanduser().absolute()) if path else ""

    def source(values: SourceOptions) -> dict[str, Any]:
        return {
            "source": tuple(map(resolved, values.source)),
            "template": absolute(values.template),
        }

    is_path = data.tokenizer != BYTES and not data.tokenizer.startswith(("bpe:", "ids:"))
    parts = tuple(replace(part, **source(part)) for part in data.mixture)
    own = {} if data.mixture else source(data)
    return {
        **own,
        "tokenizer": absolute(data.tokenizer) if is_path else data.tokenizer,
        "cache": absolute(data.cache),
        "mixture": parts,
    }


# --- find a run's folder, and check that it holds the same run

LOOSENED = ("too_long", "refuse")
"""A setting and its value that may change when a run is continued: what was refused is not among its samples."""


@dataclass(frozen=True)
class RunFolder:
    """``config.toml`` (resolved), ``request.toml`` (as asked for), ``plan.json``, ``identity.json``, ``metrics.jsonl``,
    ``checkpoints/``; ``heartbeats/`` while it runs; ``reference/`` of a run on pairs of answers.
    """

    path: Path

    @property
    def checkpoints(self) -> CheckpointFolder:
        return CheckpointFolder(self.path / "checkpoints")

    @property
    def config(self) -> Path:
        return self.path / "config.toml"

    @property
    def heartbeats(self) -> Path:
        return self.path / "heartbeats"

    @property
    def trace_check(self) -> Path:
        """File with the result of comparing the first steps with a trace."""
        return self.path / "trace_check.json"

    @property
    def is_new(self) -> bool:
        """Whether the folder does not yet hold a run's identity."""
        return not (self.path / IDENTITY).is_file()

    def checkpoint(self, step: int | None = None) -> Path:
        """Return the newest checkpoint, or that of a step. Raises ConfigError where there is none."""
        path = self.checkpoints.latest() if step is None else self.checkpoints.of_step(step)
        if path is None or not path.is_dir():
            steps = ", ".join(map(str, self.checkpoints.steps())) or "none"
            raise ConfigError(
                f"{self.path} has no checkpoint{'' if step is None else f' of step {step}'}; steps that are there:"
                f" {steps}"
            )
        return path

    @classmethod
    def open(cls, config: Config, identity: dict[str, Any], other_data: str = "") -> RunFolder:
        """Return the folder that the config names, or a new one.

        Call it on one rank; existing runs are not changed.

        The name of a new folder ends with the time, or with the Slurm job's number, so that a requeued job continues
        its own run.

        Args:
            identity: facts that must not change when a run is continued, as JSON values.
            other_data: how its data differs from that which the run began with, and what to do.

        Raises:
            ConfigError: the folder holds a run of another identity, or other files than a run's.
        """
        run = config.run or run_of_requeued_job(config)
        if not run:
            folder = cls(_new_folder(Path(config.out).expanduser(), config.name))
            note_job(folder.path, config)
            return folder
        folder = cls(Path(run).expanduser())
        folder.check_identity(identity, other_data)
        try:
            folder.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"run = {folder.path}: cannot make this folder ({error})") from None
        return folder

    def check_identity(self, identity: dict[str, Any], other_data: str = "") -> None:
        """Refuse to continue a run of another identity. Raises ConfigError."""
        stored = self.path / IDENTITY
        if not stored.is_file():
            if self.path.is_dir() and any(map(_is_foreign, self.path.iterdir())):
                raise ConfigError(
                    f"run = {self.path}: the folder is not empty and holds no run; give a new folder, or the folder"
                    f" of a run"
                )
            return
        before = read_object(stored)
        changed = list(changes(before, json.loads(json.dumps(identity))))
        if changed:
            more = f"{other_data}. " if other_data else ""
            raise ConfigError(
                f"run = {self.path} holds another run: {', '.join(changed)}. {more}Model, data, tokenizer and seed make"
                f" a run's identity; continue it with the old values, or leave run empty for a new folder. Nothing was"
                f" changed."
            )

    def write_facts(self, config: Config, identity: dict[str, Any], plan_text: str, tokenizer: Tokenizer) -> None:
        """Write the run's identity, config, plan, tokenizer and model files, each of them atomically."""
        # first: without an identity the other files would count as foreign
        replace_text(self.path / IDENTITY, json.dumps(identity, indent=1))
        replace_text(self.config, to_toml(config))
        replace_text(self.path / "plan.json", plan_text)
        keep_tokenizer(tokenizer, self.path, template_file(config))
        keep_model(config, self.path)


def _is_foreign(path: Path) -> bool:
    """Return whether a file in a folder without an identity is anything but the remnant of an interrupted start."""
    return path.name not in (FOLDER, NAME) and not path.suffix.startswith(".new")


def _new_folder(parent: Path, name: str) -> Path:
    stamp = f"slurm{job_number()}" if job_number() else time.strftime("%Y%m%d-%H%M%S")
    for attempt in range(1000):
        path = parent / (f"{name}-{stamp}" + (f"-{attempt}" if attempt else ""))
        try:
            path.mkdir(parents=True)
            return path
        except FileExistsError:
            continue
        except OSError as error:
            raise ConfigError(f"out = {parent}: cannot make a run folder there ({error})") from None
    raise ConfigError(f"out = {parent}: a thousand runs named {name} started this second")


def changes(there: Any, now: Any, key: str = "") -> Iterator[str]:
    """Describe each value that changed, by its dotted key; both arguments are JSON values."""
    if isinstance(there, dict) and isinstance(now, dict):
        for name in now:
            yield from changes(there.get(name), now[name], f"{key}.{name}" if key else name)
    elif there != now and (key.rpartition(".")[2], there) != LOOSENED:
        yield f"{key} was {str(there)[:24]} and is now {str(now)[:24]}"
