"""Stand for logits that are not computed yet, and keep the operators behind the head to do them to pieces."""

from __future__ import annotations

import linecache
import math
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from traceback import extract_tb
from typing import Any

import torch
from torch import Tensor

from meshwright.core.errors import UnsupportedError
from meshwright.core.torch_private import schema_of, tree_leaves, version_of, without_subclass_functions, wrapper

# --- find the line of a model's code that runs now

_PACKAGE = str(Path(__file__).parents[2])
_MODELS = str(Path(__file__).parents[2] / "models")
_TORCH = (str(Path(torch.__file__).parent), "<")
_MODES = ("__torch_function__", "__torch_dispatch__")


def model_line(between: str = "", *, through_torch: bool = False) -> tuple[str, int]:
    """Return the file and the number of the innermost line that is neither torch's nor this package's own.

    Args:
        between: a file of this package. Then calls that are not the model's own, but those of another file of this
            package or of torch's, have no line: ("", 0).
        through_torch: calls of torch's have that of the model's line that calls torch.
    """
    frame = sys._getframe(1)
    while frame is not None:
        file = frame.f_code.co_filename
        is_own = _is_own(file)
        if not is_own and not file.startswith(_TORCH):
            return file, frame.f_lineno
        is_passed = frame.f_code.co_name in _MODES or (through_torch and not is_own)
        if between and file != between and not is_passed:
            return "", 0
        frame = frame.f_back  # type: ignore[assignment]
    return "", 0


def line_that_raised(error: BaseException) -> str:
    """Return the place of the innermost line of a model's, or of a user's, that an error came through; "" for none."""
    frames = [(frame.filename, frame.lineno or 0) for frame in extract_tb(error.__traceback__)]
    own = [at for at in frames if not at[0].startswith(_TORCH) and not _is_own(at[0])]
    return shown(*own[-1]) if own else ""


def _is_own(file: str) -> bool:
    return file.startswith(_PACKAGE) and not file.startswith(_MODELS)


def shown(file: str, line: int) -> str:
    """Return the place of a line, with its code: "model.py:12, 'y[..., 3] = 0'"."""
    code = linecache.getline(file, line).strip()
    return f"{Path(file).name}:{line}" + (f", '{code}'" if code else "")


# --- stand for logits that are not computed yet, in the forward of a model


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


# --- cut what operators on logits take beside them, as the logits themselves are cut


@dataclass(frozen=True)
class Beside:
    """A tensor that an operator takes beside the logits, to be cut as they are.

    Attributes:
        rows: (tokens or 1, columns or 1).
        columns: the vocabulary's ids that its columns are for; None: it is not cut.
    """

    rows: Tensor
    columns: range | None


@dataclass(frozen=True)
class Ids:
    """Ids along the last dim (1-D integers, or one bool for each column) that an operator writes to."""

    ids: Tensor
    columns: range


@dataclass(frozen=True)
class Value:
    """The place of a deferred tensor among a tape's values."""

    place: int


def within(columns: range, here: range) -> range:
    """Return the ids of ``columns`` that are in ``here``, a run of ids."""
    begin = max(0, -(-(here.start - columns.start) // columns.step))
    end = max(begin, min(len(columns), -(-(here.stop - columns.start) // columns.step)))
    return columns[begin:end]


def columns_of(piece: Tensor, held: range, kept: range, here: range) -> Tensor:
    """Return a view of the columns ``kept`` of a piece that has those of ``held`` that are in ``here``."""
    have, want = within(held, here), within(kept, here)
    begin = (want.start - have.start) // have.step if want else 0
    return piece[:, begin : begin + len(want) * (want.step // have.step) : want.step // have.step]


# --- keep the operators between a head and the logits, and do them to a piece of the head's output


@dataclass(frozen=True)
class LogitsStep:
    """One operator: its arguments with values in their places, the values that it gives, how it is computed."""

    operator: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    gives: tuple[int, ...]
    writes: bool
    with_gradient: bool
    drops_dim: bool = False
    across: str = ""


@dataclass
class LogitsTape:
    """The operators between a head and the logits, in order.

    Attributes:
        lead: the dims of the logits before the last one.
        columns: the number of the vocabulary's ids.
        operate: answers an operator, of its arguments and keyword arguments.
        instead: what to do where an operator cannot be carried, for messages.
        groups: for each value, the number of the storage that it is in.
        bases: of storages of views that cannot be carried, those that they are views of.
        obstacles: of storages, what was done to them that cannot be carried.
        beside: other tensors that operators take, the number of writes to each, and the line.
        closed: the model's forward has ended.
    """

    lead: tuple[int, ...]
    columns: int
    operate: Callable[..., Any]
    instead: str = ""
    steps: list[LogitsStep] = field(default_factory=list)
    groups: list[int] = field(default_factory=list)
    bases: dict[int, int] = field(default_factory=dict)
    obstacles: dict[int, str] = field(default_factory=dict)
    beside: list[tuple[Tensor, int, str]] = field(default_factory=list)
    closed: bool = False

    def value(self, meta: Tensor, columns: range | None, dropped: bool, device: torch.device, group: int | None) -> Any:
        """Return a new deferred tensor, in a storage of its own where no ``group`` is given."""
        self.groups.append(len(self.groups) if group is None else group)
        return DeferredLogits(self, len(self.groups) - 1, meta, columns, dropped, device)

    def stop(self, values: Iterable[DeferredLogits], why: str) -> None:
        """Note that storages hold what cannot be carried, and those that they are views of."""
        for value in values:
            group: int | None = self.groups[value.place]
            while group is not None:
                self.obstacles.setdefault(group, why)
                group = self.bases.get(group)

    def stop_view(self, value: DeferredLogits, base: int | None, why: str) -> None:
        """Note that a value cannot be carried, without what it is a view of."""
        group = self.groups[value.place]
        self.obstacles[group] = why
        if base is not None:
            self.bases[group] = base

    def finish(self, logits: Tensor, *, cut: bool = False) -> DeferredLogits:
        """Return the model's logits, once it is known that they can be carried; ``cut``: ranks share the vocabulary."""
        self.closed = True
        if not isinstance(logits, DeferredLogits) or logits.tape is not self:
            raise self.refusal("something that does not follow from the head's output alone")
        if why := self.obstacle(logits, cut):
            raise self.refusal(why)
        return logits

    def refusal(self, why: str) -> UnsupportedError:
        if not self.instead:
            return UnsupportedError(why)
        return UnsupportedError(
            f"what the model does to its logits cannot be done piece by piece: {why}. {self.instead}"
        )

    def obstacle(self, logits: DeferredLogits, cut: bool) -> str:
        if (group := self.groups[logits.place]) in self.obstacles:
            return self.obstacles[group]
        if logits.dropped or math.prod(logits.shape[:-1]) != math.prod(self.lead):
            return f"logits of shape {tuple(logits.shape)} of a head's {(*self.lead, self.columns)}"
        for tensor, writes, line in self.beside:
            if version_of(tensor) != writes:
                return f"a tensor that is written to behind its use{line}"
        if cut and (across := next((step.across for step in self._needed(logits.place) if step.across), "")):
            return across
        if cut and (logits.columns is None or logits.columns.step != 1):
            return f"logits of shape {tuple(logits.shape)} that are not a run of the head's columns"
        if not torch.is_grad_enabled():
            return ""
        if not logits.requires_grad:
            return "logits that carry no gradient"
        seen, waiting = set(), [logits.grad_fn]
        while waiting:
            node = waiting.pop()
            if node is None or node in seen:
                continue
            seen.add(node)
            if isinstance(node, torch.autograd.function.BackwardCFunction):
                return f"{type(node).__name__.removesuffix('Backward')}, a function with a derivative of its own"
            waiting += [following for following, _ in node.next_functions]
        return ""

    # --- on pieces

    def replay(self, logits: DeferredLogits, piece: Tensor, *, start: int = 0, first: int = 0) -> Tensor:
        """Do to a piece of the head's output what the model did.

        Args:
            logits: what ``finish`` returned.
            piece: (tokens, ids): rows ``start`` and behind of all tokens, the vocabulary's ids ``first`` and behind.
                Written into if the model writes.

        Returns:
            (tokens, ids of the result that are in the piece).
        """
        here = range(first, first + piece.shape[-1])
        values: dict[int, Tensor] = {0: piece}
        given = partial(_given, values, slice(start, start + len(piece)), here)
        for step in self._needed(logits.place):
            with torch.set_grad_enabled(step.with_gradient and torch.is_grad_enabled()):
                if step.operator is columns_of:
                    value, held, kept = step.args
                    results: Any = columns_of(values[value.place], held, kept, here)
                else:
                    results = step.operator(*map(given, step.args), **{k: given(v) for k, v in step.kwargs.items()})
            listed = results if isinstance(results, (tuple, list)) else (results,)
            for place, result in zip(step.gives, listed, strict=True):
                values[place] = result.unsqueeze(-1) if step.drops_dim else result
        return values[logits.place]

    def shown(self, logits: DeferredLogits) -> tuple[str, ...]:
        """Return the operators that change the logits, in order, in words."""
        found = []
        for step in self._needed(logits.place):
            name = "" if step.operator is columns_of else schema_of(step.operator).name.partition("::")[2]
            if name not in ("", "alias", "detach", "clone", "_to_copy", "slice"):
                listed = [str(value) for value in step.args if isinstance(value, (int, float, bool))]
                found.append(f"{name}({', '.join(listed)})" if listed else name)
        return tuple(found)

    @property
    def writes(self) -> bool:
        return any(step.writes for step in self.steps)

    def _needed(self, place: int) -> list[LogitsStep]:
        needed, kept = {self.groups[place]}, list[LogitsStep]()
        for step in reversed(self.steps):
            if {self.groups[given] for given in step.gives} & needed:
                kept.append(step)
                given = tree_leaves((step.args, step.kwargs))  # what no tree is made of is a leaf
                needed |= {self.groups[value.place] for value in given if isinstance(value, Value)}
        return kept[::-1]


def _given(values: Mapping[int, Tensor], tokens: slice, here: range, argument: Any) -> Any:
    """Return an argument's part for some tokens and the ids ``here``."""
    match argument:
        case Value(place):
            return values[place]
        case Beside(rows, columns):
            rows = rows[tokens] if len(rows) > 1 else rows
            if columns is None or rows.shape[-1] == 1:
                return rows
            mine = within(columns, here)
            begin = (mine.start - columns.start) // columns.step
            return rows[:, begin : begin + len(mine)]
        case Ids(ids, columns):
            mine = within(columns, here)
            begin = (mine.start - columns.start) // columns.step
            if ids.dtype != torch.bool:
                chosen = torch.zeros(len(columns), dtype=torch.bool, device=ids.device)
                ids = chosen.index_fill_(0, ids.long() % len(columns), True)
            return ids[begin : begin + len(mine)].unsqueeze(0)
        case tuple() | list():
            return type(argument)(_given(values, tokens, here, one) for one in argument)
        case _:
            return argument
