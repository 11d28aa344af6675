"""Define the one error family; each class tells its reader whose move it is, and by which command to make it."""

from __future__ import annotations

import functools
import logging
import os
import re
import shlex
import shutil
import sys
from importlib import import_module
from traceback import extract_tb
from typing import Any

# --- define the one error family


class MeshwrightError(Exception):
    """The base of every error that meshwright raises on purpose.

    Where a launcher started several ranks of a script (``RANK``), one that ends a rank is printed without a traceback.
    """

    exit_status = 1

    def __init__(self, *args: object):
        super().__init__(*args)
        if os.environ.get("WORLD_SIZE", "1") != "1" and "RANK" in os.environ and sys.excepthook is not _print:
            global _before
            _before, sys.excepthook = sys.excepthook, _print


class ConfigError(MeshwrightError, ValueError):
    """A request that is wrong and that the reader can mend: the message says how."""

    exit_status = 2


class UnsupportedError(MeshwrightError, NotImplementedError):
    """A sound request that meshwright cannot fulfil: the message names the nearest thing that it can do."""

    exit_status = 3


class IntegrityError(MeshwrightError, RuntimeError):
    """Data on disk, or replicas in memory, that have changed."""


class NonFiniteError(MeshwrightError, ArithmeticError):
    """A gradient that is not a number, or infinite: the message names its parameter."""


class MissingExtraError(MeshwrightError, ImportError):
    """A needed optional dependency that is not installed: the message gives the command that installs it."""

    exit_status = 2

    def __init__(self, what: str, package: str, extra: str):
        super().__init__(
            f"{what} needs the package '{package}', which is not installed. Install it with:"
            f" {install_command(package, extra)}"
        )
        self._made_of = what, package, extra

    def __reduce__(self):
        return type(self), self._made_of  # errors travel from workers to the command


_before = sys.excepthook


def _print(kind: type[BaseException], error: BaseException, traceback: Any) -> None:
    """Print an error that ends a rank: whole on the first, and a few words elsewhere of what all ranks refuse."""
    if not isinstance(error, MeshwrightError):
        _before(kind, error, traceback)
        return
    rank, text = os.environ.get("RANK", "0"), f"{kind.__name__}: {error}"
    if rank != "0" and isinstance(error, (ConfigError, UnsupportedError)):
        print(f"rank {rank}: {text[:80]} …", file=sys.stderr)
        return
    package = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "")
    lines = [one for one in extract_tb(traceback) if not one.filename.startswith((package, "<"))]
    where = f"\n  at {lines[-1].filename}:{lines[-1].lineno}, '{lines[-1].line}'" if lines else ""
    print(f"{text}{where}" if rank == "0" else f"rank {rank}: {text}{where}", file=sys.stderr)


def command(*words: object) -> str:
    """Return a command line of meshwright that runs as it stands in the user's shell, in any environment.

    It begins as the command line that is running did; where none is, with ``meshwright`` if the shell finds this
    installation's script by that name, else with its path.
    """
    import sysconfig

    typed = sys.argv[0] if sys.argv else ""
    if os.path.basename(typed) == "meshwright" and os.path.isfile(typed):
        return shlex.join([_as_typed(typed), *map(str, words)])
    if typed.endswith(os.path.join("meshwright", "__main__.py")):
        return shlex.join([_as_typed(sys.executable), "-m", "meshwright", *map(str, words)])
    folders = [sysconfig.get_path("scripts", sysconfig.get_preferred_scheme(key)) for key in ("prefix", "user")]
    script = next(filter(os.path.isfile, (os.path.join(folder, "meshwright") for folder in folders)), None)
    program = [_as_typed(script)] if script else [_as_typed(sys.executable), "-m", "meshwright"]
    return shlex.join([*program, *map(str, words)])


def install_command(package: str, extra: str = "") -> str:
    """Return the command that installs what an extra consists of, or a package alone, beside this meshwright.

    Packages are called by their own names: an extra's would need meshwright on a package index.
    """
    from importlib import metadata, util

    try:
        lines = metadata.requires("meshwright") or []
    except metadata.PackageNotFoundError:  # imported from a source tree
        lines = []
    python = _as_typed(sys.executable)
    pip = [python, "-m", "pip", "install"] if util.find_spec("pip") else ["uv", "pip", "install", "--python", python]
    wanted = [line.partition(";")[0].strip() for line in lines if re.search(rf"""extra == ['"]{extra}['"]""", line)]
    return shlex.join([*pip, *(wanted or [package])])


def _as_typed(program: str) -> str:
    """Return the shortest word by which a shell starts a program: its name, or a path from the working folder."""
    found = shutil.which(os.path.basename(program))
    if found is not None and os.path.abspath(found) == os.path.abspath(program):
        return os.path.basename(program)
    return from_here(program)


def from_here(path: str) -> str:
    """Return a path from the working folder, if it lies below."""
    return os.path.relpath(path) if path.startswith(os.path.join(os.getcwd(), "")) else path


def nearest(word: str, choices) -> str:
    """Return a clause that names the valid spelling closest to ``word`` (empty when none is close)."""
    import difflib

    spellings = {str(choice).lower(): str(choice) for choice in choices}
    found = difflib.get_close_matches(word.lower(), spellings, n=1, cutoff=0.6)
    return f" Did you mean '{spellings[found[0]]}'?" if found else ""


# --- import objects by their dotted paths


def import_object(path: str) -> Any:
    """Import "package.module:name", from the current folder too, as ``python -m`` does; raise ConfigError with why."""
    module, _, name = path.partition(":")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        return getattr(import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(f"cannot import '{path}': {error}. It is 'package.module:name'.") from None


NOISE = re.compile(r"Failed to load .*torchao|Detected no triton|is an Enum subclass and is now natively supported")
"""Warnings of torchao and torch as torchao is imported: of kernels for other machines, and of each other's releases."""


@functools.cache
def quieten_torchao() -> None:
    """Keep ``NOISE`` out of a user's terminal; libraries of Hugging Face import torchao wherever it is installed."""
    for name in ("torchao", "torchao.kernel.intmm", "torch.utils._pytree"):
        logging.getLogger(name).addFilter(lambda record: NOISE.search(record.getMessage()) is None)


def import_classes_from_paths(class_paths: list[str]) -> list[type]:
    """Import the classes at paths "package.module.Class", in order; raise ImportError with path and reason."""
    found = []
    for path in class_paths:
        module, _, name = path.rpartition(".")
        try:
            value = getattr(import_module(module), name)
        except (ImportError, AttributeError, ValueError) as error:
            raise ImportError(
                f"cannot import the class '{path}': {error}. A class path is 'package.module.Class'."
            ) from error
        if not isinstance(value, type):
            raise ImportError(f"'{path}' is a {type(value).__name__}, not a class")
        found.append(value)
    return found
