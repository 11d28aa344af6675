"""Save and load checkpoints by global name: any legal layout reads what any other wrote, without unpickling."""

from .huggingface import pretrained
from .load import load, to_be_loaded
from .save import save

__all__ = ["load", "pretrained", "save", "to_be_loaded"]
