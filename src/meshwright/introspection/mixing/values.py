"""Describe the calls by which a model's tokens see each other."""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from meshwright.introspection.mixing.masks import MaskRule

from .interception import AttentionCall

LENGTH = "tokens of a row"
Expression = Any
"""``LENGTH``, a number, or (sign, left, right) of two expressions."""
_SIGNS: dict[str, Callable[[Any, Any], Any]] = {
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
    "//": operator.floordiv,
    "%": operator.mod,
    "/": operator.truediv,
    "**": operator.pow,
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
    "==": operator.eq,
    "!=": operator.ne,
}


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
class Arithmetic:
    """The softmax of scaled products, and what is done beside it.

    Attributes:
        cap: name of the argument with the soft cap of scores (Gemma 2, arXiv 2408.00118); "": none.
        sinks: name of the argument with one more score per head, whose share goes to no value (arXiv 2309.17453); "":
            none.
    """

    cap: str = ""
    sinks: str = ""


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
