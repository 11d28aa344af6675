"""Read what a run's folder keeps of its configs: as asked for, and as filled in from model and data. Torch-free."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from functools import reduce
from pathlib import Path
from typing import Any

from meshwright.checkpoint.folder import CheckpointFolder
from meshwright.core.config import load_toml, to_toml
from meshwright.core.config.read import shown
from meshwright.core.errors import ConfigError, command
from meshwright.core.files import read_object, replace_text
from meshwright.training.config import Config
from meshwright.training.fine_tuning import length_follows
from meshwright.training.run.occupancy import begun_by, is_occupied, other_owner

NAME, RESOLVED = "request.toml", "config.toml"
IDENTITY = "identity.json"
"""File with the facts that must not change when a run is continued."""


def keep_request(folder: Path, config: Config) -> None:
    """Write the config that a new run was asked for into its folder."""
    replace_text(folder / NAME, to_toml(config))


def read_request(folder: Path, name: str = NAME) -> Config | None:
    """Return the config that a run was asked for, or its resolved one; None where its folder has none that can be
    read.
    """
    try:
        return load_toml(Config, folder / name) if (folder / name).is_file() else None
    except ConfigError:  # keys of another version: it is only compared and shown
        return None


def words_of_complete(folder: Path, step: int, steps: int) -> str:
    """Return what to tell of a run that has taken all its steps."""
    further = command("train", folder, f"--steps={2 * max(step, steps)}")
    if step > steps:
        return f"this run has taken {step} steps, and {steps} are asked for. To train it further: {further}"
    return f"this run is complete: step {step} of {steps}. Raise steps to train it further, as in: {further}"


def completed(config: Config) -> str:
    """Return what to tell of a run whose files say that it is complete; "" where anything else must be looked at.

    That is so for a run that another job holds, for one whose length only its data tells, for one that runs code or is
    compared with a trace, and where model, data or seed are others than the run's: it is then refused, or continued, by
    the one that opens the model and the data.

    Raises:
        IntegrityError: the run's identity, or the manifest of its latest checkpoint, cannot be read.
    """
    folder = Path(config.run).expanduser()
    kept = [one for one in (read_request(folder, RESOLVED), read_request(folder)) if one] if config.run else []
    asks_more = length_follows(config) or config.model.trust_remote_code or config.check_trace
    is_same = any(
        (one.model, one.adapters, one.data, one.seed) == (config.model, config.adapters, config.data, config.seed)
        for one in kept
    )
    if asks_more or not is_same or is_occupied(folder):
        return ""
    place = config.checkpoint.folder
    step = begun_by(config.run, place).steps
    if step < config.steps or (place and other_owner(CheckpointFolder(place), folder)):
        return ""
    return words_of_complete(folder, step, config.steps) if read_object(folder / IDENTITY) else ""


# --- find the values of a config that run foreign code, and require consent

FLAG = "--trust"
MODEL_CODE = "model.trust_remote_code"
RUNS_CODE: Mapping[str, Callable[[Any], bool]] = {
    MODEL_CODE: bool,
    "techniques.checkpoint_keep": lambda words: any(":" in word for word in words),
    "slurm.setup": bool,
    "slurm.extra": bool,
}
"""Key -> whether a value of it runs code: of the model's folder, a Python function by name, lines of shell, the
environment of a job.
"""


def code_in(config: Config, keys: Collection[str] = tuple(RUNS_CODE)) -> dict[str, Any]:
    """Return the keys of a config whose values run code, and the values."""
    values = {key: reduce(lambda node, name: getattr(node, name, None), key.split("."), config) for key in keys}
    return {key: value for key, value in values.items() if value is not None and RUNS_CODE[key](value)}


def refuse_code(
    config: Config, file: object, *, given: Collection[str] = (), keys: Collection[str] = tuple(RUNS_CODE)
) -> None:
    """Refuse values of a file that run code and are not repeated on the command line.

    Args:
        config: the config that the file holds.
        file: path of the file, for the error.
        given: keys that the command line sets itself.
        keys: keys that the command uses.

    Raises:
        ConfigError: the file has such a value.
    """
    found = {key: value for key, value in code_in(config, keys).items() if key not in given}
    if found:
        values = " and ".join(f"{key} = {shown(value)}" for key, value in found.items())
        raise ConfigError(
            f"{file} holds {values}, which runs code, and no file can allow that, nor an earlier command for this one:"
            f" read that code, then add {FLAG} to this command, or give another value with --{next(iter(found))}"
        )
