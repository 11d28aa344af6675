"""Checkpoints by global name: any legal layout reads what any other wrote. Nothing that is read from disk is unpickled."""

from .load import load
from .save import save

__all__ = ["load", "save"]
