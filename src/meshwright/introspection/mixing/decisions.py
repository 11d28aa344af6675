"""Record what a model's code reads off the values of a row's tokens, by which a rank with a part may decide otherwise.

``if tokens.max() > 5`` is such a line. In the rows of a small copy both sides of it may never occur, so a line can be
told to read the other truth.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import meshwright
from meshwright.core.names import clean
from meshwright.core.torch_private import tree_leaves
from meshwright.introspection.constructor import READING, seeded
from meshwright.introspection.mixing.values import is_general_code
from meshwright.introspection.premises import playing
from meshwright.introspection.signature import Signature
from meshwright.introspection.structure.experts import find_stacks

from .arithmetic import computing_flex

Line = tuple[str, int]
"""File and number."""
Values = Mapping[Line, list[Any]]
"""What a line read, in order."""
_TORCH, _OWN = str(Path(torch.__file__).parent), str(Path(meshwright.__file__).parent)
_MODELS = str(Path(_OWN) / "models")
_COMPARING, _FEW = ("eq", "ne", "lt", "le", "gt", "ge", "isin"), 64
_MODES = ("__torch_function__", "__torch_dispatch__")


class Decisions(playing.HeldRandomness):
    """A mode that records the values that lines of a model read off tokens, and inverts those of one line.

    A number of entries that follows from values, as of ``nonzero``, is read too.

    Args:
        given: what the model is given and lines are watched for: tokens, and a mask of padding if there is one.
        apart: modules that are given whole rows on every rank; they, and stacks of experts, are not looked into.
        inverted: the line whose truth is inverted; a number becomes 0, and 0 becomes 1.

    Attributes:
        seen: the values by line.
        compared: the whole numbers with which values are compared.
    """

    def __init__(
        self,
        given: Sequence[Tensor],
        model: nn.Module,
        apart: Collection[str] = (),
        inverted: Line | None = None,
    ):
        super().__init__(given[0], stacks=("apart",))
        for tensor in given[1:]:
            self._note(tensor, self._by_tokens)
        self.seen, self.inverted, self._hooks = dict[Line, list[Any]](), inverted, ExitStack()
        self.compared = set[int]()
        apart = {*apart, *(clean(path) for path in find_stacks(model))}
        for module in (module for path, module in model.named_modules() if clean(path) in apart):
            enter = module.register_forward_pre_hook(lambda *_: self.within.append("apart"))
            leave = module.register_forward_hook(lambda *_: (self.within.pop(), None)[1], always_call=True)
            self._hooks.callback(enter.remove)
            self._hooks.callback(leave.remove)

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._hooks.close()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        before, self.decides = self.decides, False
        out = super().__torch_dispatch__(func, types, args, kwargs)
        if self.decides and func.overloadpacket.__name__ not in READING:
            first = next(leaf for leaf in tree_leaves(out) if isinstance(leaf, Tensor))
            self._read(first.numel())
        self.decides = self.decides or before
        if func.overloadpacket.__name__ in _COMPARING and self._depends(args[0]):
            few = (other for other in args[1:] if isinstance(other, Tensor) and other.numel() <= _FEW)
            values = [*args[1:], *(value for other in few for value in other.flatten().tolist())]
            self.compared.update(value for value in values if type(value) is int)
        return out

    def _read(self, value: Any) -> Any:
        line = None if self.within[-1] in self.stacks else _line()
        if line is None:
            return value
        self.decides = True
        self.seen.setdefault(line, []).append(value)
        return playing.inverted(value) if line == self.inverted else value


def _line() -> Line | None:
    """Return the line that reads, if it is a model's."""
    frame = sys._getframe(1)
    while frame is not None:
        file = frame.f_code.co_filename
        reads = file not in (__file__, playing.__file__) and frame.f_code.co_name not in _MODES
        if reads and not file.startswith(_TORCH):
            is_own = file.startswith(_OWN) and not file.startswith(_MODELS)
            return None if is_own or is_general_code(file) else (file, frame.f_lineno)
        frame = frame.f_back  # type: ignore[assignment]
    return None


def watched(batch: Mapping[str, Tensor]) -> list[Tensor]:
    """List those of a batch by whose values a rank with a part of its rows may decide otherwise."""
    return [batch[key] for key in ("tokens", "attention_mask") if key in batch]


def decides(model: nn.Module, batch: Mapping[str, Tensor], apart: Collection[str]) -> bool:
    """Return whether a forward reads, or makes a tensor of a size that follows from, the values of tokens."""
    mode = Decisions(watched(batch), model, apart)
    with seeded(0), torch.no_grad(), computing_flex(), mode:  # one rank may ask, and streams stay alike
        model(**Signature.of(model).inputs(dict(batch), torch.device("cpu")))
    return mode.decides
