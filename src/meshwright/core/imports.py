"""Import objects by their dotted paths."""

from __future__ import annotations

import functools
import logging
import os
import re
import sys
from importlib import import_module
from typing import Any

from .errors import ConfigError


def import_object(path: str) -> Any:
    """Import "package.module:name"; the current folder counts as importable, as for ``python -m``.

    Raises:
        ConfigError: the object cannot be imported; the message says why.
    """
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
    """Import the classes at paths "package.module.Class", in order.

    Raises:
        ImportError: a class cannot be imported; the message names the path and the reason.
    """
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
