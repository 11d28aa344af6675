"""Write and read a Trainer's folders: transformers' files of the model, and beside them the state to go on from."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import torch

from meshwright.checkpoint import save
from meshwright.core.errors import ConfigError
from meshwright.core.record import recall
from meshwright.distributed.parallel_model import ParallelModel
from meshwright.distributed.process import agree
from meshwright.introspection.constructor.origin import ModelOrigin
from meshwright.planning.techniques import Techniques
from meshwright.training.run.saved import convert_saved

STATE = "meshwright"
"""Folder inside a checkpoint of Trainer: shards of model and optimizer, which any layout reads."""


def state_folder(checkpoint: str | Path) -> Path:
    """Return the folder with the state of a checkpoint.

    Raises:
        ConfigError: there is no checkpoint; another Trainer wrote it, or one with save_only_model.
    """
    if not Path(checkpoint).is_dir():
        raise ConfigError(
            f"{checkpoint} does not exist, or is no folder: give resume_from_checkpoint a folder checkpoint-N that this"
            f" Trainer wrote into output_dir, or True for its last one"
        )
    folder = Path(checkpoint) / STATE
    if not folder.is_dir():
        raise ConfigError(
            f"{checkpoint} has no folder {STATE}: it was written with save_only_model = True, or by another Trainer."
            f" Start from its weights instead: the model by from_pretrained({str(checkpoint)!r}), without"
            f" resume_from_checkpoint"
        )
    return folder


def write_model(
    model: ParallelModel,
    folder: Path,
    requested: Techniques,
    optimizer: torch.optim.Optimizer | None,
    *,
    keeps: bool,
) -> None:
    """Write the shards, and from them the model as transformers (or, with adapters, peft) reads it (collective).

    Args:
        keeps: whether the shards stay, to go on from.
    """
    shards = folder / (STATE if keeps else f"{STATE}-shards")
    save(model, shards, optimizer=optimizer, only_trained=requested.adapters is not None)
    agree.decided_once(lambda: _export(model, shards, folder, "adapter" if requested.adapters is not None else "hf"))
    if not keeps:
        agree.decided_once(lambda: shutil.rmtree(shards, ignore_errors=True))


def _export(model: ParallelModel, shards: Path, folder: Path, form: str) -> None:
    origin = recall(model, ModelOrigin)
    if origin is None or not origin.config:
        raise ConfigError(
            f"{model.facts.kind} is no model of transformers' own, which save_model could write: set save_strategy ="
            f" 'no', and write the shards with meshwright.save(trainer.parallel, FOLDER)"
        )
    made = folder / f"{STATE}-export"
    shutil.rmtree(made, ignore_errors=True)
    convert_saved(shards, made, form)
    for path in made.iterdir():
        path.replace(folder / path.name)
    made.rmdir()


def write_small_files(folder: Path, arguments: Any, tokenizer: Any) -> None:
    """Write tokenizer and arguments, as Trainer has them beside a model."""
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)
    torch.save(arguments, folder / "training_args.bin")


def read_scheduler(scheduler: Any, checkpoint: str) -> None:
    scheduler.load_state_dict(torch.load(Path(checkpoint) / "scheduler.pt", weights_only=True))
