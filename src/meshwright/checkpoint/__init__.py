"""Checkpoints by global name: any legal layout reads what any other wrote. Nothing that is read from disk is unpickled."""

from .huggingface import pretrained
from .load import load, to_be_loaded
from .save import save

__all__ = ["load", "pretrained", "save", "to_be_loaded"]
