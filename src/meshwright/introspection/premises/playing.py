"""Run forward and backward on a copy of a model with random draws fixed, and record numbers that Python reads."""

from __future__ import annotations

import functools
import pickle
import random
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from statistics import NormalDist
from typing import Any

import numpy
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from meshwright.core.names import clean
from meshwright.core.torch_private import EagerDispatchMode, tree_leaves
from meshwright.introspection.calls import watching
from meshwright.introspection.constructor import READING, seeded
from meshwright.introspection.logits_tape import model_line
from meshwright.introspection.mixing.arithmetic import computing_flex
from meshwright.introspection.mixing.values import is_general_code
from meshwright.introspection.signature import Signature
from meshwright.introspection.small.copies import copy_of
from meshwright.introspection.structure.experts import find_stacks

ROWS = 4
"""Rows of a batch."""
MIDDLE, EXTREMES = 0.5, (0.0, 1.0 - 2.0**-20)
"""Quantiles at which draws are held: by themselves, and to toss a coin both ways, unless one side has no chance."""


@dataclass
class Play:
    """The outputs (rows first) and existing gradients of one batch by name, and the modules' inputs and outputs."""

    outputs: dict[str, Tensor]
    gradients: dict[str, Tensor]
    losses: tuple[str, ...]
    names: tuple[str, ...]
    sparse: tuple[str, ...]
    seen: dict[str, tuple[list[Tensor], list[Tensor]]] = field(default_factory=dict)
    kinds: dict[str, str] = field(default_factory=dict)
    reads: Mapping[Any, Reading] = field(default_factory=dict)
    """What was read, by place."""
    sizes: tuple[Any, ...] = ()
    """Places where an operator returned a tensor whose size depends on the data, or Python made a list of them."""
    decides: bool = False
    """Whether Python saw a number or a size that depends on the data."""
    tosses: bool = False
    """Whether Python saw a number that depends on random draws alone, its own generator's among them."""


@dataclass(frozen=True)
class Reading:
    """A value that Python read.

    Attributes:
        value: what was read.
        number: that value, or the number that a truth compares; None: of a truth, none is known.
        sign: 1: further rows can only raise the value, -1: only lower it, 0: unknown.
    """

    value: Any
    number: float | None
    sign: int

    def others(self) -> list[Any]:
        """List values that it may have with many further rows in the batch."""
        if isinstance(self.value, bool):
            may_turn = self.sign == (-1 if self.value else 1) or (self.sign == 0 and self.number is not None)
            return [not self.value] * may_turn
        if isinstance(self.value, int):
            return [self.value + 1, self.value * MANY] if self.sign >= 0 else [self.value - 1]
        far = MANY * (1 + abs(self.value))
        return [self.value + by for by in (far, -far) if by * self.sign >= 0]


MANY = 64
"""How many times as many rows as there are give the farther of the numbers that may be read instead."""


def played(
    model: nn.Module,
    tokens: Tensor,
    *,
    offset: int | None = None,
    turned: Any = None,
    instead: Any = None,
    level: float = MIDDLE,
    seed: int = 1,
    beside: Mapping[str, Tensor] | None = None,
) -> Play:
    """Run one batch through a fresh copy of the model.

    Args:
        tokens: (rows, seq).
        beside: what the batch has beside tokens: images.
        offset: index of the first row in the whole batch; None: ``tokens`` is the whole batch.
        turned: the place in the code whose number is inverted.
        instead: what is read there; None: the inverse of the number.
        level: the quantile at which every draw of torch is held.
        seed: of Python's generator and numpy's.
    """
    made = copy_of(model)
    seen: dict[str, tuple[list[Tensor], list[Tensor]]] = {}
    held = HeldRandomness(tokens, turned, {clean(path) for path in find_stacks(made)}, level, instead)

    def leave(path: str, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        held.within.pop()
        seen.setdefault(path, (_tensors((args, kwargs)), _tensors(output)))  # keeps the first of several calls

    watch = watching(made.named_modules(), lambda path, *_: held.within.append(path), leave)
    with watch, held, _Lists(held):
        output, by_python = called(made, tokens, beside, seed)
        rows, losses = parts(output, len(tokens))
        if beside:  # features of images are given back too, which are no rows
            rows = {name: value for name, value in rows.items() if name.startswith("logits.")} or rows
        target = torch.zeros((), dtype=torch.float64)
        for number, tensor in enumerate(value for value in rows.values() if value.requires_grad):
            generator = torch.Generator().manual_seed(number)
            whole = torch.randn((max(ROWS, len(tokens)), *tensor.shape[1:]), generator=generator, dtype=torch.float64)
            target = target + (tensor.double() * whole[offset or 0 :][: len(tokens)]).sum()
        if target.requires_grad:
            target.backward()
    named = {clean(name): parameter for name, parameter in made.named_parameters()}
    found = {name: parameter.grad for name, parameter in named.items() if parameter.grad is not None}
    sparse = tuple(name for name, gradient in found.items() if gradient.is_sparse)
    gradients = {name: gradient.to_dense() if name in sparse else gradient for name, gradient in found.items()}
    kinds = {clean(path): type(module).__name__ for path, module in made.named_modules()}
    outputs = {name: value.detach() for name, value in rows.items()}
    facts = (outputs, gradients, losses, tuple(named), sparse, seen, kinds, held.reads, tuple(held.sizes))
    return Play(*facts, held.decides, held.tosses or by_python)


def called(
    model: nn.Module, tokens: Tensor, beside: Mapping[str, Tensor] | None = None, seed: int = 1
) -> tuple[Any, bool]:
    """Call a model under a seed; return its output, and whether it drew from generators of Python or numpy."""
    with seeded(seed), computing_flex():
        before = pickle.dumps((random.getstate(), numpy.random.get_state()))
        output = model(**Signature.of(model).inputs({"tokens": tokens, **(beside or {})}, tokens.device))
        return output, before != pickle.dumps((random.getstate(), numpy.random.get_state()))


def parts(output: Any, rows: int) -> tuple[dict[str, Tensor], tuple[str, ...]]:
    """Collect the tensors with a value for each row, and the names of numbers that a backward could start from."""
    if isinstance(output, Tensor):
        fields: Iterable[tuple[str, Any]] = [("output", output)]
    elif isinstance(output, Mapping):
        fields = output.items()
    elif isinstance(output, (tuple, list)):
        fields = [(f"[{number}]", value) for number, value in enumerate(output)]
    else:
        own = dict(vars(output)) if hasattr(output, "__dict__") else {}
        fields = ({"logits": getattr(output, "logits", None)} | own).items()
    found: dict[str, Tensor] = {}
    losses = []
    for name, value in fields:
        for number, tensor in enumerate(
            leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor) and leaf.is_floating_point()
        ):
            if tensor.dim() and len(tensor) == rows:
                found[f"{name}.{number}"] = tensor
            elif tensor.numel() == 1 and tensor.requires_grad:
                losses.append(name)
    return found, tuple(dict.fromkeys(losses))


def _tensors(value: Any) -> list[Tensor]:
    return [leaf.detach() for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]


class HeldRandomness(EagerDispatchMode):
    """A mode that fixes random draws and records where Python reads numbers that depend on tokens or draws.

    Args:
        tokens: the input on which the numbers depend.
        turned: the read number to invert: true becomes false, an integer becomes 0, and 0 becomes 1.
        stacks: modules of stacked experts, which share one gradient: reads in them decide over none.
        level: the quantile at which every draw is held.

    Attributes:
        tosses: whether a number was read that depends on draws alone.
        decides: whether a number was read, or an operator returned a tensor whose size depends on the data.
        generators: state behind a first draw from a generator that is given to the operator, by module.
        within: paths of the modules whose forwards run, the innermost last.
        reads: what was read, by file and line, the module, and the count of reads there so far.
        sizes: places where a size that depends on the data, or a list of them, was seen.
    """

    def __init__(
        self,
        tokens: Tensor,
        turned: Any = None,
        stacks: Collection[str] = (),
        level: float = MIDDLE,
        instead: Any = None,
    ):
        super().__init__()
        self.level, self.tosses, self.instead = level, False, instead
        self.turned, self.stacks, self.reads, self.within = turned, stacks, dict[tuple, Reading](), [""]
        self.decides, self.sizes, self._signs = False, list[tuple](), dict[int, int]()
        self.generators = dict[str, bytes]()
        self._numbers: dict[int, float] = {}  # that truths compare, by the truth's storage
        self._times: dict[tuple, int] = {}
        self._held = dict[int, Any]()  # storages: freed memory could become another tensor's
        self._by_tokens, self._by_draws = set[int](), set[int]()
        self._note(tokens, by_tokens=True)

    def _note(self, value: Any, by_tokens: bool, by_draws: bool = False, sign: int = 0) -> None:
        """Note what the tensors of a result depend on."""
        for part in value if isinstance(value, (tuple, list)) else (value,):
            for leaf in part if isinstance(part, (tuple, list)) else (part,):
                if isinstance(leaf, Tensor) and not leaf.is_sparse:
                    storage = leaf.untyped_storage()
                    key = id(storage)
                    self._held[key], self._signs[key] = storage, sign
                    if by_tokens:
                        self._by_tokens.add(key)
                    if by_draws:
                        self._by_draws.add(key)

    def note_size(self, value: Any) -> None:
        """Note that Python has all values of a tensor, if they depend on tokens."""
        if self._depends(value) and self.within[-1] not in self.stacks:
            self.decides = True
            self.sizes.append((*model_line(), self.within[-1]))

    def _depends(self, value: Any) -> bool:
        """Return whether a value is a tensor that depends on tokens."""
        return isinstance(value, Tensor) and not value.is_sparse and id(value.untyped_storage()) in self._by_tokens

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        storages, signs = list[int](), list[int]()  # of all tensors given; few calls, since this runs at each operator
        for value in (*args, *kwargs.values()):
            for leaf in value if isinstance(value, (tuple, list)) else (value,):
                if isinstance(leaf, Tensor):
                    storages.append(0 if leaf.is_sparse else id(leaf.untyped_storage()))
                    signs.append(self._signs.get(storages[-1], 0))
        draws, name = _draws(func), func.overloadpacket.__name__
        tossed = draws and name.startswith(("rand", "uniform", "bernoulli", "normal"))  # others are turned as data are
        by_tokens = (draws and not tossed) or not self._by_tokens.isdisjoint(storages)
        by_draws = tossed or not self._by_draws.isdisjoint(storages)
        depends = by_tokens or by_draws
        out = func(*args, **kwargs)
        sign = _sign(name, signs, args) if depends and (name in SIGNED or any(signs)) else 0
        if name in COMPARISONS and by_tokens and isinstance(out, Tensor) and args[0].numel() == 1:
            self._numbers[id(out.untyped_storage())] = float(args[0])
        if name in READING:
            self._sign, self._number = sign, self._numbers.get(storages[0]) if storages else None
            self.tosses = self.tosses or (by_draws and not by_tokens and self.within[-1] not in self.stacks)
            return self._read(out) if by_tokens else out
        if depends and torch.Tag.dynamic_output_shape in func.tags and self.within[-1] not in self.stacks:
            self.decides = True
            self.sizes += [(*model_line(), self.within[-1])] * by_tokens
        if draws:
            if (own := kwargs.get("generator")) is not None and self.within[-1] not in self.generators:
                self.generators[self.within[-1]] = own.get_state().numpy().tobytes()
            out = _still(func, args, out, self.level)
        if depends:
            self._note(out, by_tokens, by_draws, sign)
        return out

    def _read(self, value: Any) -> Any:
        if self.within[-1] in self.stacks:
            return value
        place = (*model_line(), self.within[-1])
        self._times[place] = time = self._times.get(place, 0) + 1
        sign = self._sign if abs(self._sign) < 2 else 0 if isinstance(value, bool) else 1
        self.reads[(*place, time)] = Reading(value, self._number if isinstance(value, bool) else float(value), sign)
        self.decides = True
        if (*place, time) != self.turned:
            return value
        return inverted(value) if self.instead is None else self.instead


def inverted(value: Any) -> Any:
    """Return another truth, an integer that is 0 where the value was not, or another number."""
    return (not value) if isinstance(value, bool) else int(value == 0) if isinstance(value, int) else -value - 1


RAISED = ("any", "max", "amax", "count_nonzero", "sum", "linalg_vector_norm", "norm", "logical_or")
LOWERED = ("all", "min", "amin", "equal", "logical_and")
"""Reductions that further rows can only raise, or lower; sums are those of counts."""
SIGNED = {*RAISED, *LOWERED, "mean"}
"""Operators whose result may have a sign though their tensors have none."""
KEPT = {*READING, "_to_copy", "alias", "clone", "detach", "select", "sqrt", "squeeze", "unsqueeze", "view"}
TURNED = {"neg", "logical_not", "bitwise_not"}
COMPARISONS = {"gt": 1, "ge": 1, "ne": 1, "lt": -1, "le": -1, "eq": -1}
"""Operators whose result goes the same way, or the other way, as their tensor; eq and ne of counts, with 0."""
SHARE = 2
"""The sign of a share, as of the tokens that are chosen: never negative, and further rows make no positive one zero."""


def _sign(name: str, given: list[int], args: Sequence[Any]) -> int:
    """Return the sign of a result: 1 where further rows can only raise it, -1 where only lower it, 0 where unknown."""
    if name in ("mean", "sum") and not (args[0].is_complex() or args[0].is_meta):
        return 0 if bool((args[0] < 0).any()) else SHARE if name == "mean" else 1
    if given[:1] == [SHARE] and name in COMPARISONS:
        return COMPARISONS[name] if type(args[1]) in (int, float) and args[1] == 0 else 0
    if name in ("div", "mul") and given[:1] in ([1], [SHARE]) and not any(given[1:]):
        return SHARE
    if name in RAISED or name in LOWERED:
        return 1 if name in RAISED else -1
    first, *others = given or [0]
    return 0 if any(others) else first * COMPARISONS.get(name, (name in KEPT) - (name in TURNED))


class _Lists(TorchFunctionMode):
    """A mode that notes where Python makes lists or arrays of data, which no operator sees."""

    def __init__(self, held: HeldRandomness):
        super().__init__()
        self.held = held

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if func in (Tensor.tolist, Tensor.numpy, Tensor.__array__):
            self.held.note_size(args[0])
        return func(*args, **(kwargs or {}))


class FixedDraws(EagerDispatchMode):
    """A mode that fixes random draws, and no more; ``seen`` says whether there were some."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if not _draws(func):
            return out
        self.seen = True
        return _still(func, args, out)


@functools.cache
def _draws(func: Any) -> bool:
    """Return whether an operator draws random numbers.

    Fused attention carries the tag for its dropout alone, and on a CPU attention with dropout goes by other operators.
    """
    name = func.overloadpacket.__name__
    return torch.Tag.nondeterministic_seeded in func.tags and not name.startswith("_scaled_dot_product")


def _still(func: Any, args: Sequence[Any], out: Any, level: float = MIDDLE) -> Any:
    """Fill results with values that ignore earlier draws; integers and permutations keep the values of the seed."""
    name = func.overloadpacket.__name__
    if name == "native_dropout":
        return args[0].clone(), torch.ones_like(args[0], dtype=torch.bool)
    if name.startswith("bernoulli"):
        chance = args[1] if len(args) > 1 else 0.5 if name.endswith("_") else args[0]
        return out.copy_(torch.as_tensor((0.0 if level == MIDDLE else level) < chance))
    if level != MIDDLE and name.startswith(("randn", "normal")):
        level = NormalDist().inv_cdf(min(max(level, 1e-6), 1 - 1e-6))
    for leaf in tree_leaves(out):
        if isinstance(leaf, Tensor) and (leaf.is_floating_point() or leaf.dtype == torch.bool):
            leaf.fill_(1 if name.startswith("_fused_dropout") else level)
    return out


# --- record the lines that read values of a row's tokens, by which a rank with a part may decide otherwise

Line = tuple[str, int]
"""File and number."""
Values = Mapping[Line, list[Any]]
"""What a line read, in order."""
_COMPARING, _FEW = ("eq", "ne", "lt", "le", "gt", "ge", "isin"), 64


class Decisions(HeldRandomness):
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
        self, given: Sequence[Tensor], model: nn.Module, apart: Collection[str] = (), inverted: Line | None = None
    ):
        super().__init__(given[0], stacks=("apart",))
        for tensor in given[1:]:
            self._note(tensor, by_tokens=True)
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
        line = ("", 0) if self.within[-1] in self.stacks else model_line(__file__, through_torch=True)
        if not line[0] or is_general_code(line[0]):
            return value
        self.decides = True
        self.seen.setdefault(line, []).append(value)
        return inverted(value) if line == self.inverted else value


def watched(batch: Mapping[str, Tensor]) -> list[Tensor]:
    """List those of a batch by whose values a rank with a part of its rows may decide otherwise."""
    return [batch[key] for key in ("tokens", "attention_mask") if key in batch]


def decides(model: nn.Module, batch: Mapping[str, Tensor], apart: Collection[str]) -> bool:
    """Return whether a forward reads, or makes a tensor of a size that follows from, the values of tokens."""
    mode = Decisions(watched(batch), model, apart)
    with seeded(0), torch.no_grad(), computing_flex(), mode:  # one rank may ask, and streams stay alike
        model(**Signature.of(model).inputs(dict(batch), torch.device("cpu")))
    return mode.decides
