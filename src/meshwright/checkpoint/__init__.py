"""Save and load checkpoints by global name: any legal layout reads what any other wrote, without unpickling.

Torch is imported by whoever saves or loads: what is in a folder is told, and pieces are written, without it.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .background import save
    from .huggingface import pretrained
    from .loading import load, to_be_loaded

__all__ = ["load", "pretrained", "save", "to_be_loaded"]

_HOMES = {"load": "loading", "pretrained": "huggingface", "save": "background", "to_be_loaded": "loading"}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".{_HOMES[name]}", __name__), name)
