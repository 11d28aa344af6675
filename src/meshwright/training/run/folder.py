"""Find a run's folder, check that it holds the same run, and write the paths of its data as absolute ones."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import zip_longest
from pathlib import Path
from typing import Any

from meshwright.checkpoint.folder import CheckpointFolder, Claim, checkpoints_of, step_of
from meshwright.checkpoint.manifest import Manifest
from meshwright.checkpoint.store import Location, place_of
from meshwright.checkpoint.tensor_files import TensorFiles, holds_weights
from meshwright.core.config import to_toml
from meshwright.core.dtypes import bytes_text, count_text
from meshwright.core.errors import ConfigError, IntegrityError
from meshwright.core.files import read_object, replace_text
from meshwright.data import SourceOptions, Tokenizer
from meshwright.data.scan import resolved
from meshwright.data.tokenizers import BYTES
from meshwright.data.turns import OWN
from meshwright.introspection.facts import describe_model, describe_premises, describe_structure, model_facts
from meshwright.introspection.source import as_module, read_causal_lm
from meshwright.planning.plan import Plan
from meshwright.training.config import Config, DataConfig
from meshwright.training.metrics import read_metrics
from meshwright.training.model_source import keep_model, keep_tokenizer, template_file
from meshwright.training.run.occupancy import NAME
from meshwright.training.run.request import IDENTITY
from meshwright.training.slurm import FOLDER, job_number, note_job, run_of_requeued_job

# --- write the paths of a run's data as absolute ones, so that it can be continued from any folder


def absolute_paths(data: DataConfig) -> dict[str, Any]:
    """Return the data section's paths as absolute ones, so that a run can be continued from any folder."""

    def absolute(path: str) -> str:
        return str(Path(path).expanduser().absolute()) if path else ""

    def source(values: SourceOptions) -> dict[str, Any]:
        template = values.template if values.template == OWN else absolute(values.template)
        return {"source": tuple(map(resolved, values.source)), "template": template}

    is_path = data.tokenizer != BYTES and not data.tokenizer.startswith(("bpe:", "ids:"))
    tokenizer = absolute(data.tokenizer) if is_path else data.tokenizer
    parts = tuple(replace(part, **source(part)) for part in data.mixture)
    return {"tokenizer": tokenizer, "cache": absolute(data.cache), "mixture": parts} | (
        source(data) if not parts else {}
    )


# --- find a run's folder, and check that it holds the same run

LOOSENED = ("too_long", "refuse")
"""A setting and its value that may change when a run is continued: what was refused is not among its samples."""


@dataclass(frozen=True)
class RunFolder:
    """``config.toml`` (resolved), ``request.toml`` (as asked for), ``plan.json``, ``identity.json``, ``metrics.jsonl``,
    ``checkpoints/``; ``heartbeats/`` while it runs; ``reference/`` of a run on pairs of answers.

    Attributes:
        claim: a job's right to save its checkpoints; None where the folder is only read.
    """

    path: Path
    claim: Claim | None = None

    @property
    def checkpoints(self) -> CheckpointFolder:
        return checkpoints_of(self.path)

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

    def checkpoint(self, step: int | None = None) -> Location:
        """Return the newest checkpoint, or that of a step. Raises ConfigError where there is none."""
        there = self.checkpoints.steps()
        path = self.checkpoints.latest() if step is None else self.checkpoints.of_step(step)
        if path is None or step_of(path) not in there:
            steps = ", ".join(map(str, there)) or "none"
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
            parent = Path(config.out).expanduser()
            stamp = f"slurm{job_number()}" if job_number() else time.strftime("%Y%m%d-%H%M%S")
            for attempt in range(1000):
                path = parent / (f"{config.name}-{stamp}" + (f"-{attempt}" if attempt else ""))
                try:
                    path.mkdir(parents=True)
                except FileExistsError:
                    continue
                except OSError as error:
                    raise ConfigError(f"out = {parent}: cannot make a run folder there ({error})") from None
                note_job(path, config)
                return cls(path)
            raise ConfigError(f"out = {parent}: a thousand runs named {config.name} started this second")
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
            # an interrupted start leaves a lock, a job's folder, and files that were not whole
            remnants = (FOLDER, NAME)
            there = self.path.iterdir() if self.path.is_dir() else ()
            if any(path.name not in remnants and not path.suffix.startswith(".new") for path in there):
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


def changes(there: Any, now: Any, key: str = "") -> Iterator[str]:
    """Describe each value that changed, by its dotted key, and of a list the first; both arguments are JSON values."""
    if isinstance(there, dict) and isinstance(now, dict):
        for name in now:
            yield from changes(there.get(name), now[name], f"{key}.{name}" if key else name)
    elif isinstance(there, list) and isinstance(now, list):
        rows = enumerate(zip_longest(there, now))
        yield from next((changes(*pair, f"{key}[{at}]") for at, pair in rows if pair[0] != pair[1]), ())
    elif there != now and (key.rpartition(".")[2], there) != LOOSENED:
        texts = str(there), str(now)
        alike = next((at for at, (a, b) in enumerate(zip_longest(*texts)) if a != b), 0)
        was, is_now = (f"…{text[alike - 12 : alike + 12]}" if alike >= 24 else text[:24] for text in texts)
        yield f"{key} was {was} and is now {is_now}"


# --- describe the contents of a run's folder from its small text files


def describe_run(path: Path, config: Config) -> str:
    """Describe a run: name, data (with the beginning of its digest), progress, checkpoints and plan."""
    folder = RunFolder(path)
    key = (read_object(path / IDENTITY) if (path / IDENTITY).is_file() else {}).get("data", "unknown")
    rows = [("name", config.name)]
    if config.data.mixture:
        for part, (name, known) in zip(config.data.mixture, dict(key).items(), strict=False):
            rows.append(("data", f"{name}: {', '.join(part.source)}, weight {part.weight:g} ({known['data'][:12]})"))
    else:
        rows.append(("data", f"{', '.join(config.data.source)} ({str(key)[:12]})"))
    metrics = path / "metrics.jsonl"
    steps = [row for row in read_metrics(metrics) if "loss" in row] if metrics.is_file() else []
    progress = f"no step yet, of {config.steps}"
    if steps:
        last = steps[-1]
        progress = f"step {last['step']} of {config.steps}, {count_text(last['tokens'])} tokens"
        progress += f", loss {last['loss']:.4f}"
        validation = next((row["validation_loss"] for row in reversed(steps) if "validation_loss" in row), None)
        progress += f", validation loss {validation:.4f}" if validation is not None else ""
    rows += [("seed", str(config.seed)), ("progress", progress)]
    latest = None
    try:
        latest = folder.checkpoints.latest()
    except IntegrityError as error:
        rows.append(("latest", str(error)))
    for where in map(folder.checkpoints.of_step, folder.checkpoints.steps()):
        text = f"{place_of(where)[1]}: "
        try:
            manifest = Manifest.read(where)
        except IntegrityError as error:
            text += str(error)
        else:
            parameters = sum(1 for key in manifest.tensors if key.startswith("model."))
            text += f"{parameters} parameters and buffers, {len(manifest.tensors)} tensors, "
            size = sum(entry.bytes for entry in manifest.files.values())
            text += f"{bytes_text(size)} in {len(manifest.files)} files"
        rows.append(("checkpoint", f"{text}{'  (latest)' if where == latest else ''}"))
    for left in folder.checkpoints.half_written():
        rows.append(("half done", f"{place_of(left)[1]}: an interrupted save, never used"))
    plan = path / "plan.json"
    text = "\n".join([f"run {path}", *(f"  {name:<10}  {line}" for name, line in rows)])
    return text + (f"\n\n{Plan.from_json(plan.read_text())}" if plan.is_file() else "")


def describe_hugging_face(path: Path, *, trusted: bool = False) -> str:
    """Describe a Hugging Face model, and the weights beside its config."""
    facts = model_facts(as_module(read_causal_lm(path, trust_remote_code=trusted)))
    lines = [describe_model(facts), describe_structure(facts), describe_premises(facts)]
    if path.is_dir() and holds_weights(path):
        files = TensorFiles(path)
        dtypes = ", ".join(sorted({str(tensor.dtype).removeprefix("torch.") for tensor in files.tensors.values()}))
        size = sum(tensor.bytes for tensor in files.tensors.values())
        count = len({tensor.file for tensor in files.tensors.values()})
        lines.append(
            f"  weights: {len(files.tensors)} tensors, {dtypes}, {bytes_text(size)} in {count} file{'s' * (count > 1)}"
        )
    else:
        lines.append("  weights: none beside the config")
    return "\n".join(lines)
