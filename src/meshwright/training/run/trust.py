"""Find the values of a config that run foreign code, and require consent.

A config file may come from anybody, with the run or the model that it describes, so no file can allow its own code:
such a value is accepted only as a flag on this command line, or together with ``--trust``. Torch-free.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from functools import reduce
from typing import Any

from meshwright.core.config.read import shown
from meshwright.core.errors import ConfigError
from meshwright.training.config import Config

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
