"""Describe the contents of a run folder from its small text files."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from meshwright.checkpoint.manifest import Manifest
from meshwright.checkpoint.tensor_files import TensorFiles, holds_weights
from meshwright.core.dtypes import bytes_text, count_text
from meshwright.core.errors import IntegrityError
from meshwright.core.files import read_object
from meshwright.introspection.facts import describe_model, describe_premises, describe_structure, model_facts
from meshwright.introspection.source import as_module, read_causal_lm
from meshwright.planning.plan import Plan
from meshwright.training.config import Config
from meshwright.training.metrics.metrics import read_metrics

from .folder import RunFolder


def describe_run(path: Path, config: Config) -> str:
    """Describe a run: name, data, progress, checkpoints and plan."""
    folder = RunFolder(path)
    identity = read_object(path / "identity.json") if (path / "identity.json").is_file() else {}
    lines = [
        f"run {path}",
        f"  name        {config.name}",
        *(f"  data        {line}" for line in _data(config, identity.get("data", "unknown"))),
        f"  seed        {config.seed}",
    ]
    lines += _progress(path, config)
    latest, problem = _latest(folder)
    lines += [f"  latest      {problem}"] if problem else []
    for step in folder.checkpoints.steps():
        where = folder.checkpoints.of_step(step)
        lines.append(f"  checkpoint  {_checkpoint(where)}{'  (latest)' if where == latest else ''}")
    lines += [
        f"  half done   {left.name}: an interrupted save, never used" for left in folder.checkpoints.half_written()
    ]
    plan = path / "plan.json"
    return "\n".join(lines) + (f"\n\n{Plan.from_json(plan.read_text())}" if plan.is_file() else "")


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


def _data(config: Config, key: Any) -> Iterator[str]:
    """Yield a line for each source, with the beginning of its digest."""
    if not config.data.mixture:
        yield f"{', '.join(config.data.source)} ({str(key)[:12]})"
        return
    for part, (name, known) in zip(config.data.mixture, dict(key).items(), strict=False):
        yield f"{name}: {', '.join(part.source)}, weight {part.weight:g} ({known['data'][:12]})"


def _latest(folder: RunFolder) -> tuple[Path | None, str]:
    try:
        return folder.checkpoints.latest(), ""
    except IntegrityError as error:
        return None, str(error)


def _progress(path: Path, config: Config) -> list[str]:
    metrics = path / "metrics.jsonl"
    rows = [row for row in read_metrics(metrics) if "loss" in row] if metrics.is_file() else []
    if not rows:
        return [f"  progress    no step yet, of {config.steps}"]
    last = rows[-1]
    validation = next((row["validation_loss"] for row in reversed(rows) if "validation_loss" in row), None)
    held_out = f", validation loss {validation:.4f}" if validation is not None else ""
    return [
        f"  progress    step {last['step']} of {config.steps}, {count_text(last['tokens'])} tokens, loss"
        f" {last['loss']:.4f}{held_out}"
    ]


def _checkpoint(folder: Path) -> str:
    try:
        manifest = Manifest.read(folder)
    except IntegrityError as error:
        return f"{folder.name}: {error}"
    parameters = sum(1 for key in manifest.tensors if key.startswith("model."))
    size = sum(entry.bytes for entry in manifest.files.values())
    inside = f"{parameters} parameters and buffers, {len(manifest.tensors)} tensors"
    return f"{folder.name}: {inside}, {bytes_text(size)} in {len(manifest.files)} files"
