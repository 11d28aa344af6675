"""Describe the calls by which tokens see each other, and what a model's code does with the number of a row's tokens."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from meshwright.core.names import is_within, pattern
from meshwright.core.torch_private import tree_leaves
from meshwright.introspection.calls import tracking
from meshwright.introspection.logits_tape import model_line
from meshwright.introspection.mixing.arithmetic import Arithmetic, computing_flex
from meshwright.introspection.mixing.interception import AttentionCall
from meshwright.introspection.mixing.masks import MaskRule
from meshwright.introspection.signature import Signature
from meshwright.introspection.small.copies import meta_copy_of

LENGTH = "tokens of a row"
Expression = Any
"""``LENGTH``, a number, or (sign, left, right) of two expressions."""
_COMPUTING = {"add": "+", "sub": "-", "mul": "*", "floordiv": "//", "mod": "%", "truediv": "/", "pow": "**"}
_COMPARING = {"lt": "<", "le": "<=", "gt": ">", "ge": ">=", "eq": "==", "ne": "!="}
_SIGNS = {sign: getattr(operator, word) for word, sign in (_COMPUTING | _COMPARING).items()}


def value_of(expression: Expression, length: int) -> Any:
    """Return the number, or the truth, of an expression for rows of ``length`` tokens."""
    if isinstance(expression, tuple):
        sign, left, right = expression
        return _SIGNS[sign](value_of(left, length), value_of(right, length))
    return length if expression == LENGTH else expression


def in_words(expression: Expression) -> str:
    if not isinstance(expression, tuple):
        return str(expression)
    sign, left, right = expression
    return " ".join((in_words(left), sign, f"({in_words(right)})" if isinstance(right, tuple) else in_words(right)))


COUNTS = ("positions", "table", "scan")
"""Kinds of uses of a row's length that are given what they are in whole rows."""


@dataclass(frozen=True)
class Sizes:
    """The sizes of one call of attention: heads, and features of one head."""

    heads: int
    key_heads: int
    key_features: int
    value_features: int

    @classmethod
    def of(cls, call: AttentionCall) -> Sizes:
        return cls(call.query.shape[1], call.key.shape[1], call.key.shape[3], call.value.shape[3])


@dataclass(frozen=True)
class Caller:
    """A module whose forward calls attention.

    Attributes:
        path: the module.
        sizes: of one call.
        interface: called through transformers' interface, which gives the mask as a function of places; else
            ``F.scaled_dot_product_attention`` is called.
        rule: of the mask. Of a call through the interface the rule tells how far the mask reaches, and no more; None:
            the mask reaches by no rule that is known.
        is_dense: the model gives the mask as a tensor, and does not state its rule (``mask_rule`` of the module, in the
            words of ``MaskRule``): in longer rows than those that were measured it may follow another one.
        arithmetic: how scores become an output; None: in a way of its own.
        flex: ``flex_attention`` is called, whose mask is a function of places too; ``rule`` tells how far that
            reaches, and no more.
    """

    path: str
    sizes: Sizes
    interface: bool
    rule: MaskRule | None = field(default_factory=MaskRule)
    is_dense: bool = False
    arithmetic: Arithmetic | None = None
    flex: bool = False


@dataclass(frozen=True)
class MixerInput:
    """A tensor with tokens that a mixer is given, or returns.

    Attributes:
        key: its path in the arguments or in the output, such as "[1]['hidden_states']".
        dim: the dim of the tokens.
        is_read: its values count, and not its shape alone.
        is_integer: it has no gradient, nor the dtype of the computation.
        follows: it depends on the row's tokens, and so has a gradient.
        features: numbers of one token, in the model itself.
    """

    key: str
    dim: int
    is_read: bool = True
    is_integer: bool = False
    follows: bool = True
    features: int = 0

    def joined(self, other: MixerInput) -> MixerInput:
        """Return what two batches show together."""
        return replace(self, is_read=self.is_read or other.is_read, follows=self.follows or other.follows)


@dataclass(frozen=True)
class Mixer:
    """A module in which tokens meet otherwise than in a call of attention, or that needs a row's every token.

    Attributes:
        path: the module.
        why: a clause that says how its tokens depend on each other.
        inputs, outputs: the tensors with tokens that it is given and returns.
        pairs: paths of other arguments that depend on a row's length and padding, and on no weight: masks and biases
            of pairs of tokens, which are computed of whole rows.
        has_attention: it calls attention in a way that parts of a row cannot be given.
    """

    path: str
    why: str
    inputs: tuple[MixerInput, ...]
    outputs: tuple[MixerInput, ...]
    pairs: tuple[str, ...] = ()
    has_attention: bool = False

    def joined(self, other: Mixer) -> Mixer:
        """Return a mixer with the arguments and outputs of both, which were found on different batches."""
        pairs = tuple(dict.fromkeys((*self.pairs, *other.pairs)))
        inputs, outputs = _joined(self.inputs, other.inputs), _joined(self.outputs, other.outputs)
        return replace(self, inputs=inputs, outputs=outputs, pairs=pairs)


def _joined(one: tuple[MixerInput, ...], other: tuple[MixerInput, ...]) -> tuple[MixerInput, ...]:
    found = {each.key: each for each in one}
    for each in other:
        found[each.key] = found[each.key].joined(each) if each.key in found else each
    return tuple(found.values())


@dataclass(frozen=True)
class LengthUse:
    """A line that does something with the number of a row's tokens, where a rank has a part of them.

    Attributes:
        module: the innermost modules whose forwards run it, as a pattern of their paths.
        kind: "positions", a range of so many integers; "table", so many entries of a longer tensor; "scan", sums of
            the integers of all tokens before each; "condition", a comparison; "number", other arithmetic.
        expression: of a condition, what is compared.
    """

    module: str
    file: str
    line: int
    kind: Literal["positions", "table", "scan", "condition", "number"]
    expression: Expression = LENGTH


@dataclass(frozen=True)
class Mixing:
    """The calls by which a model's tokens see each other.

    Attributes:
        callers: modules that call attention, in the order of their calls.
        implementation: the name of transformers' implementation that computes them; "" for other models.
        packed: whether each mask of a forward, in the order in which transformers makes them, keeps runs of positions
            apart.
        mixers: modules in which tokens meet otherwise, in the order in which they return.
        lengths: lines outside of these that do something with the number of a row's tokens.
        counts_from_zero: given no positions, the model takes 0, 1, 2 …
    """

    callers: tuple[Caller, ...]
    implementation: str = ""
    packed: tuple[bool, ...] = ()
    mixers: tuple[Mixer, ...] = ()
    lengths: tuple[LengthUse, ...] = ()
    counts_from_zero: bool = True

    @property
    def counts_positions(self) -> bool:
        """The model makes positions by counting the tokens of a row, the same for all rows."""
        return any(use.kind in ("positions", "table") for use in self.lengths)

    @property
    def keeps_documents_apart(self) -> bool:
        """No call sees from one document of a packed row to another."""
        if self.implementation:
            return bool(self.packed) and all(self.packed) and all(caller.interface for caller in self.callers)
        return all(caller.rule is not None and caller.rule.documents for caller in self.callers)


# --- find what a model's code does with the number of a row's tokens

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
    """A whole number that is computed from a row's tokens by an ``expression``; notes what is done with it."""

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
        self.length, self.running = length, [""]
        self.found: dict[LengthUse, None] = {}

    def note(self, kind: Any, expression: Expression = LENGTH) -> None:
        file, line = model_line(__file__)
        if file and not is_general_code(file):
            self.found.setdefault(LengthUse(pattern(self.running[-1]), file, line, kind, expression))

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

    Modules ``inside`` are given whole rows. ``makes_positions``: the model is given none where a batch has none.
    """
    uses = _uses_of(small, torch.device("cpu"), makes_positions)
    if any(use.kind == "condition" for use in uses):
        # numbers that a condition compares with are the model's own, where its code runs without values
        of_model = _by_line(_uses_of(meta_copy_of(model), torch.device("meta"), makes_positions))
        uses = [use for line, here in _by_line(uses).items() for use in of_model.get(line, here)]
    return tuple(use for use in uses if not any(is_within(use.module, pattern(path)) for path in inside))


def _by_line(uses: list[LengthUse]) -> dict[tuple[str, str, int, str], list[LengthUse]]:
    found: dict[tuple[str, str, int, str], list[LengthUse]] = {}
    for use in uses:
        found.setdefault((use.module, use.file, use.line, use.kind), []).append(use)
    return found


def _uses_of(model: nn.Module, device: torch.device, makes_positions: bool) -> list[LengthUse]:
    sizes = {size for tensor in (*model.parameters(), *model.buffers()) for size in tensor.shape}
    signature = Signature.of(model)
    for length in (prime for prime in PRIMES if prime not in sizes):
        tokens = torch.zeros((2, length), dtype=torch.int64, device=device)
        batch = {"tokens": tokens, "positions": torch.arange(length, device=device).expand(2, -1)}
        batch = {key: value for key, value in batch.items() if signature.takes[key] is not None}
        uses = _Uses(length)
        given = [batch, {"tokens": tokens}] if makes_positions else [batch]
        hooks = tracking(model.named_modules(), uses.running)
        try:
            with torch.no_grad(), hooks, computing_flex(), uses:
                for each, training in itertools.product(given, (True, False)):
                    model.train(training)(**signature.inputs(each, device))
            return list(uses.found)
        except Exception:  # noqa: BLE001  (whatever a model's code raises; a shorter row may do)
            if device.type == "meta":
                return list(uses.found)
    return []
