"""Look private names up, and say in one sentence what is not there and what needed it."""

from __future__ import annotations

import functools
import importlib
import inspect
import re
import sys
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

from meshwright.core.devices import cuda_release
from meshwright.core.errors import UnsupportedError, quieten_torchao
from meshwright.core.host import DOCTOR, installed

from .names import LIBRARIES, TORCH
from .row import EVERYTHING, PrivateName

P = ParamSpec("P")
R = TypeVar("R")

TABLE: tuple[PrivateName, ...] = (*TORCH, *LIBRARIES)
"""Every private name that the package reaches."""
_ROWS = {row.path: row for row in TABLE}
_FOUND: dict[str, Any] = {}


def found(path: str) -> Any:
    """Import a name of the table.

    Raises:
        UnsupportedError: the installed library lacks it; the sentence says what needs it.
    """
    if path not in _FOUND:
        try:
            _FOUND[_ROWS[path].path] = walk(path)
        except (ImportError, AttributeError) as error:
            raise absent(path) from error
    return _FOUND[path]


def found_or_none(path: str) -> Any:
    """Import a name of the table; return None where the library lacks it, for what goes on without."""
    try:
        return found(path)
    except UnsupportedError:
        return None


def needs(*paths: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Decorate a function that reads attributes of the table from objects: a missing one is refused by its row."""
    names = {_ROWS[path].name: path for path in paths}

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        @functools.wraps(function)
        def run(*args: P.args, **kwargs: P.kwargs) -> R:
            try:
                return function(*args, **kwargs)
            except AttributeError as error:
                if error.name in names:
                    raise absent(names[error.name]) from error
                raise

        return run

    return decorate


def absent(path: str) -> UnsupportedError:
    """Return the refusal of what needs a name that is not there."""
    row = _ROWS[path]
    rest = DOCTOR if row.needed_by == EVERYTHING else "the rest works ('meshwright doctor' lists what does)"
    return UnsupportedError(
        f"{row.package} {installed(row.package)} has no {path}, which {row.needed_by} needs; {rest}"
    )


def missing() -> list[PrivateName]:
    """Return the rows whose names the installed libraries lack.

    Rows of libraries that are not installed are left out, and names that the installed release or build is known to
    have no more, or not yet.
    """
    quieten_torchao()
    return [
        row
        for row in TABLE
        if row.is_expected() and not (row.cuda_only and cuda_release() is None) and not is_there(row)
    ]


def is_there(row: PrivateName) -> bool:
    """Return whether a name can be imported, or is an attribute that its class's module declares or sets."""
    owner, _, name = row.path.rpartition(".")
    try:
        held = walk(owner)
        if hasattr(held, name) or not inspect.isclass(held):
            walk(row.path)
            return True
        source = inspect.getsource(sys.modules[held.__module__])
    except Exception:  # noqa: BLE001  whatever a library raises as it is imported
        return False
    return re.search(rf"(?m)^\s+(\w+\.)*{name}\b[^(\n]*[:=]|\.{name}\b[^(\n]*=", source) is not None


def walk(path: str) -> Any:
    """Import the longest prefix of a path that is a module, and read the rest as attributes.

    Raises:
        ImportError, AttributeError: it ends on the way.
    """
    parts = path.split(".")
    held = importlib.import_module(parts[0])
    for place, part in enumerate(parts[1:], 2):
        if not hasattr(held, part) and inspect.ismodule(held) and hasattr(held, "__path__"):
            held = importlib.import_module(".".join(parts[:place]))
        else:
            held = getattr(held, part)
    return held
