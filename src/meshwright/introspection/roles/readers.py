"""Find the linear layers whose weights other code reads in a forward, beside the layers themselves."""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import nn

from meshwright.core.names import clean, pattern
from meshwright.introspection.small.copies import copy_of
from meshwright.introspection.small.sample import Sample

MAY_READ = ("meshwright.", "torch.distributed.", "torch.nn.modules.module", "torch._", "torch.fx.")
"""Modules whose code does not compute with the weights that it reads."""
OWN = "torch.nn.modules.linear"


def reader_of(frame: Any, *others: str) -> str:
    """Return the module and function that a frame belongs to; "" if it may read a weight.

    Args:
        others: further modules that may.
    """
    module = frame.f_globals.get("__name__", "")
    return "" if f"{module}.".startswith((*MAY_READ, *others)) else f"{module}: {frame.f_code.co_name}"


class _Watched(nn.Linear):
    """A linear layer that notes in ``read_by`` who reads its weight."""

    read_by: str = ""

    def __getattr__(self, name: str) -> Any:
        if name == "weight" and (reader := reader_of(sys._getframe(1), OWN)):
            self.__dict__["read_by"] = reader
        return super().__getattr__(name)


def find_readers(sample: Sample) -> dict[str, str]:
    """Map patterns of linear layers' paths to the code that reads their weights in the sample's forwards.

    Empty where those fail.
    """
    model = copy_of(sample.model)
    watched = {clean(raw): module for raw, module in model.named_modules() if type(module) is nn.Linear}
    for module in watched.values():
        module.__class__ = _Watched
    with torch.no_grad():
        for inputs in sample.inputs:
            try:
                model(**inputs)
            except Exception:  # noqa: BLE001  (the layers themselves refuse readers of bytes)
                return {}
    return {pattern(path): module.read_by for path, module in watched.items() if module.read_by}  # type: ignore[union-attr]
