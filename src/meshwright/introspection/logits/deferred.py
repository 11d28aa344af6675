"""Stand for logits that are not computed yet, in the forward of a model."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from meshwright.core.torch_private import tree_leaves, without_subclass_functions, wrapper

from .model_line import model_line, shown

if TYPE_CHECKING:
    from .tape import LogitsTape


class DeferredLogits(Tensor):
    """A tensor without values: a head's logits, or what a model made of them.

    Attributes:
        columns: the vocabulary's ids that the last dim is for; None: it is for something else.
        dropped: the last dim was dropped: it is for one column.
    """

    tape: LogitsTape
    place: int
    meta: Tensor
    columns: range | None
    dropped: bool

    @staticmethod
    def __new__(
        cls, tape: LogitsTape, place: int, meta: Tensor, columns: range | None, dropped: bool, device: torch.device
    ):
        made = wrapper(cls, meta, device)
        made.tape, made.place, made.meta, made.columns, made.dropped = tape, place, meta, columns, dropped
        return made

    def __init__(self, *args: Any):
        pass

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        with without_subclass_functions():
            return function(*args, **(kwargs or {}))

    def register_hook(self, hook: Any) -> Any:
        self.tape.stop([self], f"a hook on the logits' gradient{where()}")
        return super().register_hook(hook)

    @classmethod
    def __torch_dispatch__(cls, operator: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        first = next(leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, DeferredLogits))
        return first.tape.operate(operator, args, kwargs or {})


def where() -> str:
    """Return the place of the model's line that runs now, with its code: " at model.py:12, 'y[..., 3] = 0'"."""
    file, line = model_line()
    return f" at {shown(file, line)}" if file else ""
