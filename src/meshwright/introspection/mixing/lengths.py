"""Find what a model's code does with the number of a row's tokens, which a rank that has a part of them does not know.

A forward runs in which that number is of a class of its own wherever code reads it off a tensor, and so is what is
computed from it, with the way in which it is. So these places are known: ranges of it (positions), slices by it (of a
table of positions), comparisons (conditions), which can be asked again for any length, and arithmetic that gives
fractions or takes tensors (numbers).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from meshwright.core.names import is_within, pattern
from meshwright.core.torch_private import tree_leaves
from meshwright.introspection.calls import watching
from meshwright.introspection.logits.tape import model_line
from meshwright.introspection.signature import Signature
from meshwright.introspection.small.copies import meta_copy_of

from .arithmetic import computing_flex
from .values import LENGTH, Expression, LengthUse, value_of

PRIMES = (29, 23, 31, 19, 17, 13, 11, 7, 5)
SHAPES = frozenset(
    "view reshape expand expand_as repeat tile unflatten flatten permute transpose chunk split tensor_split narrow"
    " zeros ones empty full rand randn new_zeros new_ones new_empty new_full roll pad select tril triu as_strided"
    " broadcast_to unfold repeat_interleave scaled_dot_product_attention size __getitem__ __setitem__ __get__ arange"
    " eye masked_fill interpolate adaptive_avg_pool1d".split()
)
"""Functions in which a number of tokens is a size or a place."""


def is_general_code(file: str) -> bool:
    """Return whether a file is of transformers and none of its models': it is given masks of whole rows."""
    return "/transformers/" in file and "/transformers/models/" not in file


class Length(int):
    """A whole number that is computed from a row's tokens; notes what is done with it.

    Attributes:
        expression: how it is computed (``values.Expression``).
    """

    uses: _Uses
    expression: Expression

    def __new__(cls, uses: _Uses, expression: Expression):
        return _made(super().__new__, cls, uses, expression)

    __hash__ = int.__hash__


class Share(float):
    """A fraction that is computed from a row's tokens; as ``Length``."""

    def __new__(cls, uses: _Uses, expression: Expression):
        return _made(super().__new__, cls, uses, expression)

    __hash__ = float.__hash__


def _made(new: Callable[..., Any], cls: type, uses: _Uses, expression: Expression) -> Any:
    made = new(cls, value_of(expression, uses.length))
    made.uses, made.expression = uses, expression
    return made


def _operating(sign: str, *, reflected: bool = False, compares: bool = False) -> Callable[..., Any]:
    def operate(self: Any, other: Any = 0) -> Any:
        if type(other) not in (int, float, Length, Share):
            return NotImplemented
        sides = self.expression, getattr(other, "expression", other)
        expression = (sign, *(reversed(sides) if reflected else sides))
        value = value_of(expression, self.uses.length)
        if compares:
            self.uses.note("condition", expression)
            return value
        if isinstance(value, int):
            return Length(self.uses, expression)
        self.uses.note("number")
        return Share(self.uses, expression)

    return operate


_COMPUTING = {"add": "+", "sub": "-", "mul": "*", "floordiv": "//", "mod": "%", "truediv": "/", "pow": "**"}
_COMPARING = {"lt": "<", "le": "<=", "gt": ">", "ge": ">=", "eq": "==", "ne": "!="}
for _kind in (Length, Share):
    for _word, _sign in _COMPUTING.items():
        setattr(_kind, f"__{_word}__", _operating(_sign))
        setattr(_kind, f"__r{_word}__", _operating(_sign, reflected=True))
    for _word, _sign in _COMPARING.items():
        setattr(_kind, f"__{_word}__", _operating(_sign, compares=True))
    _kind.__neg__ = _operating("-", reflected=True)  # 0 - x


class _Uses(TorchFunctionMode):
    """Notes what a forward does with the number of its rows' tokens."""

    def __init__(self, length: int):
        super().__init__()
        self.length, self._modules = length, [""]
        self.found: dict[LengthUse, None] = {}

    def enter(self, path: str, *_: Any) -> None:
        self._modules.append(pattern(path))

    def leave(self, *_: Any) -> None:
        self._modules.pop()

    def note(self, kind: Any, expression: Expression = LENGTH) -> None:
        file, line = model_line(__file__)
        if file and not is_general_code(file):
            self.found.setdefault(LengthUse(self._modules[-1], file, line, kind, expression))

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        lengths = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, (Length, Share))]
        if name == "arange":
            start, end = ends_of_range(args, kwargs)
            if lengths and end - start == self.length:
                self.note("positions")
        elif name == "__getitem__" and isinstance(args[0], Tensor):
            table = args[0]
            index = args[1]
            for dim, run in runs_of(table, index).items():
                stop = run.stop
                is_run = isinstance(stop, Length) and int(stop) - int(run.start or 0) == self.length
                if is_run and table.size(dim) != self.length:
                    self.note("table")
        elif (x := scanned(func, args, kwargs)) is not None and x.size(1) == self.length:
            self.note("scan")
        elif lengths and name not in SHAPES:
            self.note("number")
        result = func(*args, **kwargs)
        if name == "numel" and self.length in args[0].shape:
            return Length(self, ("*", LENGTH, result // self.length))
        is_shape = (name == "size" or getattr(func, "__self__", None) is Tensor.shape) and isinstance(args[0], Tensor)
        if not is_shape:
            return result
        sizes = [result] if isinstance(result, int) else result
        marked = [Length(self, LENGTH) if size == self.length else size for size in sizes]
        return marked[0] if isinstance(result, int) else torch.Size(marked)


def runs_of(x: Tensor, index: Any) -> dict[int, slice]:
    """Return the slices with an end, and steps of one, of an index, by the dim of ``x`` that they cut."""
    items = index if isinstance(index, tuple) else (index,)
    if any(isinstance(item, (Tensor, list, bool)) for item in items):
        return {}
    dim, found = 0, {}
    for item in items:
        if item is Ellipsis:
            dim += x.dim() - sum(other is not None and other is not Ellipsis for other in items)
        elif item is not None:
            ends = (item.start or 0, item.stop) if isinstance(item, slice) and item.step in (None, 1) else ()
            if ends and all(isinstance(end, int) for end in ends) and int(ends[0]) >= 0:
                found[dim] = item
            dim += 1
    return found


def ends_of_range(args: tuple, kwargs: dict[str, Any]) -> tuple[int, int]:
    """Return start and end of an ``arange`` of whole numbers one apart; (0, -1) of others."""
    given = dict(zip(("start", "end", "step") if len(args) > 1 else ("end",), args, strict=False)) | kwargs
    start, end = given.get("start", 0), given.get("end")
    is_whole = isinstance(start, int) and isinstance(end, int) and given.get("step", 1) == 1
    return (int(start), int(end)) if is_whole else (0, -1)  # type: ignore[arg-type]


def scanned(func: Any, args: tuple, kwargs: dict[str, Any]) -> Tensor | None:
    """Return the (rows, tokens) integers that a call sums along the tokens; None of other calls."""
    if func not in (torch.cumsum, Tensor.cumsum):
        return None
    given = dict(zip(("input", "dim"), args, strict=False)) | kwargs
    x: Tensor = given["input"]
    return x if given["dim"] in (1, -1) and x.dim() == 2 and not x.is_floating_point() else None


def find_length_uses(
    model: nn.Module, small: nn.Module, inside: tuple[str, ...], *, makes_positions: bool
) -> tuple[LengthUse, ...]:
    """Run forwards of a small copy, and of the model itself on meta, and return what they do with their length.

    Args:
        small: a copy that computes.
        inside: modules that are given whole rows, in which everything is known.
        makes_positions: the model is given no positions where a batch has none.
    """
    by_line = []
    for made, device in ((small, torch.device("cpu")), (meta_copy_of(model), torch.device("meta"))):
        found: dict[tuple[str, str, int, str], list[LengthUse]] = {}
        for use in _uses_of(made, device, makes_positions):
            found.setdefault((use.module, use.file, use.line, use.kind), []).append(use)
        by_line.append(found)
    # numbers that a condition compares with are the model's own, where its code runs without values
    uses = [use for line, here in by_line[0].items() for use in by_line[1].get(line, here)]
    return tuple(use for use in uses if not any(is_within(use.module, pattern(path)) for path in inside))


def _uses_of(model: nn.Module, device: torch.device, makes_positions: bool) -> list[LengthUse]:
    sizes = {size for tensor in (*model.parameters(), *model.buffers()) for size in tensor.shape}
    signature = Signature.of(model)
    for length in (prime for prime in PRIMES if prime not in sizes):
        tokens = torch.zeros((2, length), dtype=torch.int64, device=device)
        batch = {"tokens": tokens, "positions": torch.arange(length, device=device).expand(2, -1)}
        batch = {key: value for key, value in batch.items() if signature.takes[key] is not None}
        uses = _Uses(length)
        given = [batch, {"tokens": tokens}] if makes_positions else [batch]
        hooks = watching(model.named_modules(), uses.enter, uses.leave)
        try:
            with torch.no_grad(), hooks, computing_flex(), uses:
                for each, training in itertools.product(given, (True, False)):
                    model.train(training)(**signature.inputs(each, device))
            return list(uses.found)
        except Exception:  # noqa: BLE001  (whatever a model's code raises; a shorter row may do)
            if device.type == "meta":
                return list(uses.found)
    return []
