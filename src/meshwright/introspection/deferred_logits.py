"""Record what a model's forward does to its logits, so that the same is done to some tokens or columns at a time.

The head returns ``DeferredLogits``: a tensor with shape, dtype and device of the whole logits and no values. The
model's own code runs on it; the operators that reach it are noted, and computed later on pieces by
``LogitsTape.replay``. Conditions, lengths, attributes and numbers of the forward are those of this very call. An
operator that acts on each token by itself is carried; of a vocabulary that ranks share, one that acts on each column by
itself. Whatever else the logits are made by is an obstacle, with the line of the model that does it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from meshwright.core.errors import UnsupportedError
from meshwright.core.torch_private import schema_of, tree_leaves, tree_map_only, version_of
from meshwright.introspection.calls import watching
from meshwright.introspection.constructor import written
from meshwright.introspection.logits_tape import (
    Beside,
    DeferredLogits,
    Ids,
    LogitsStep,
    LogitsTape,
    Value,
    columns_of,
    where,
)
from meshwright.introspection.signature import logits_of
from meshwright.introspection.small.copies import copy_of
from meshwright.introspection.small.sample import SEQ

POINTWISE = frozenset(
    "fill_ fill copy_ copy zero_ zero _to_copy zeros_like ones_like full_like empty_like masked_fill masked_fill_"
    " alias detach clone lift_fresh contiguous".split()
)
"""Operators on each element that torch does not tag as such."""
MADE_ANEW = frozenset("new_empty new_zeros new_ones new_full new_empty_strided".split())
"""Operators that take dtype and device of a tensor, and nothing else."""
OVER_COLUMNS = frozenset(
    "_softmax _log_softmax softmax log_softmax logsumexp amax amin max min sum mean argmax argmin var std cumsum sort"
    " topk linalg_vector_norm norm any all gather scatter scatter_ index_select".split()
)
"""Operators along one dim: each token by itself if that is the last."""
READS = frozenset("_local_scalar_dense is_nonzero equal item".split())
"""Operators that hand values to Python."""


def begin(like: Tensor, vocabulary: int, instead: str = "") -> tuple[LogitsTape, Tensor]:
    """Return a tape, and the deferred logits of a head.

    Args:
        like: the head's input, or some columns of its output.
        vocabulary: number of the head's columns.
        instead: what to do where an operator cannot be carried, for messages.
    """
    tape = LogitsTape(tuple(like.shape[:-1]), vocabulary, lambda *call: _Operation(*call).result(), instead)
    meta = torch.empty((*tape.lead, vocabulary), dtype=like.dtype, device="meta")
    first = tape.value(meta, range(vocabulary), False, like.device, None)
    if not torch.is_grad_enabled():
        return tape, first
    # autograd looks on above: it shows functions with a derivative of their own
    begun: Any = first.requires_grad_().clone()
    tape.steps.clear()
    tape.groups, begun.place = [0], 0
    return tape, begun


class _Operation:
    """One operator that reached deferred logits."""

    def __init__(self, operator: Any, args: tuple, kwargs: dict[str, Any]):
        self.operator, self.args, self.kwargs = operator, args, kwargs
        self.schema = schema_of(operator)
        self.name = self.schema.name.partition("::")[2]
        self.deferred = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, DeferredLogits)]
        self.first = self.deferred[0]
        self.tape = self.first.tape
        self.written = [leaf for leaf in written(operator, args, kwargs) if isinstance(leaf, Tensor)]

    def result(self) -> Any:
        if self.name in MADE_ANEW:
            like = torch.empty(0, dtype=self.first.dtype, device=self.first.device)
            return self.operator(like, *self.args[1:], **self.kwargs)
        if self.tape.closed and self.name not in ("detach", "alias"):
            raise self.tape.refusal(f"the logits are used behind the model's forward{where()}")
        if self.name in READS:
            raise self.tape.refusal(f"values of the logits are read{where()}")
        if any(not isinstance(value, DeferredLogits) for value in self.written):
            raise self.tape.refusal(f"the logits are written into another tensor{where()}")
        # compute shapes, and raise what torch raises of these
        args, kwargs = tree_map_only(
            Tensor,
            lambda x: x.meta if isinstance(x, DeferredLogits) else torch.empty_like(x, device="meta") if x.dim() else x,
            (self.args, self.kwargs),
        )
        if "device" in kwargs:
            kwargs["device"] = torch.device("meta")
        if self.name in ("index_put_", "index_put", "_index_put_impl_", "_unsafe_index_put"):
            metas = args[0] if self.name.endswith("_") else torch.empty_like(args[0])
        else:
            with torch.no_grad():
                metas = self.operator(*args, **kwargs)
        groups = (self.tape.groups[value.place] for value in self.deferred)
        why = next((self.tape.obstacles[group] for group in groups if group in self.tape.obstacles), "")
        others = [leaf for leaf in tree_leaves((self.args, self.kwargs)) if isinstance(leaf, Tensor)]
        trained = any(other.requires_grad for other in others if not isinstance(other, DeferredLogits))
        if not why and torch.is_grad_enabled() and trained:
            why = f"{self.name} with a tensor that is trained{where()}"
        if not why and torch.Tag.nondeterministic_seeded in self.operator.tags:
            why = f"{self.name}, which draws random numbers{where()}"
        if not why:
            made = self._carried(metas)
            if not isinstance(made, str):
                return made
            why = f"{made}{where()}"
        self.tape.stop([value for value in self.written if isinstance(value, DeferredLogits)], why)
        return self._given(metas, None, False, why)

    # --- what it gives

    def _given(self, metas: Any, columns: range | None, dropped: bool, why: str = "") -> Any:
        """Return deferred tensors of these shapes: those written into, views of an argument, or new ones."""
        if self.written:
            return self.written[0] if self.schema.returns else None
        is_view = any(declared.alias_info is not None for declared in self.schema.returns)
        base = self.tape.groups[self.first.place] if is_view and self.args[0] is self.first else None

        def one(meta: Any) -> Any:
            if not isinstance(meta, Tensor):
                return meta
            device = torch.device(self.kwargs.get("device") or self.first.device)
            value = self.tape.value(meta, columns, dropped, device, None if why else base)
            if why:  # nobody may need it, but who writes into it writes into what it is a view of
                self.tape.stop_view(value, base, why)
            return value

        return type(metas)(map(one, metas)) if isinstance(metas, (tuple, list)) else one(metas)

    def _note(
        self,
        metas: Any,
        columns: range | None,
        dropped: bool,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        operator: Any = None,
        *,
        drops: bool = False,
        across: bool = False,
    ) -> Any:
        """Add a step, and return what it gives."""
        for other in tree_leaves((self.args, self.kwargs)):
            if isinstance(other, Tensor) and not isinstance(other, DeferredLogits):
                self.tape.beside.append((other, version_of(other), where()))
        given = self._given(metas, columns, dropped)
        places = tuple(value.place for value in (given if isinstance(given, (tuple, list)) else (given,)))
        step = LogitsStep(
            operator or self.operator,
            args,
            kwargs,
            places,
            bool(self.written),
            torch.is_grad_enabled(),
            drops,
            f"{self.name} over the vocabulary{where()}" if across else "",
        )
        self.tape.steps.append(step)
        return given

    # --- what can be carried

    def _carried(self, metas: Any) -> Any:
        """Note the operator and return what it gives, or say what it does that cannot be carried."""
        name, x = self.name, self.first
        if name in ("view", "_unsafe_view", "reshape", "expand", "unsqueeze", "squeeze"):
            same_rows = math.prod(metas.shape[:-1]) == math.prod(x.shape if x.dropped else x.shape[:-1])
            if x.dropped and self.name == "unsqueeze" and metas.dim() == x.dim() + 1 and metas.shape[-1] == 1:
                return self._note(metas, x.columns, False, (Value(x.place),), {}, torch.ops.aten.alias.default)
            if not x.dropped and metas.shape[-1:] == x.shape[-1:] and same_rows:
                return self._note(metas, x.columns, False, (Value(x.place),), {}, torch.ops.aten.alias.default)
            if self.name == "expand" and x.columns is None and same_rows:
                args = (Value(x.place), (-1, metas.shape[-1]))
                return self._note(metas, None, False, args, {}, torch.ops.aten.expand.default)
            return f"{self.name} to {tuple(metas.shape)}"
        if name in ("slice", "select"):
            if name == "slice" and metas.shape == x.shape:
                return self._note(metas, x.columns, x.dropped, (Value(x.place),), {}, torch.ops.aten.alias.default)
            if x.dropped or (self.args[1] if len(self.args) > 1 else 0) % x.dim() != x.dim() - 1:
                return f"{name} of tokens"
            held = range(x.shape[-1]) if x.columns is None else x.columns
            if name == "select":
                chosen = held[list(self.args)[2]]
                kept = range(chosen, chosen + 1)
            else:
                start, end, step = [*self.args[2:], None, None, None][:3]
                kept = held[start:end:step]
            if x.columns is not None:
                return self._note(metas, kept, name == "select", (Value(x.place), x.columns, kept), {}, columns_of)
            begins, step = held.index(kept.start) if kept else 0, kept.step
            args = (Value(x.place), -1, begins, begins + len(kept) * step, step)
            return self._note(metas, None, name == "select", args, {}, torch.ops.aten.slice.Tensor)
        if torch.Tag.pointwise in self.operator.tags or name in POINTWISE:
            return self._pointwise(metas)
        if name in ("index_put_", "index_put", "_index_put_impl_", "index_fill_", "index_fill", "index"):
            return self._indexed(metas)
        if name in OVER_COLUMNS or name in ("cat", "constant_pad_nd", "mm", "addmm"):
            return self._over_columns(metas)
        return name

    def _pointwise(self, metas: Tensor) -> Any:
        shape = max(self.deferred, key=lambda value: (math.prod(value.shape), value.columns is not None))
        dropped, lead = shape.dropped, tuple(shape.shape if shape.dropped else shape.shape[:-1])
        for value in self.deferred:
            if value.dropped != dropped or tuple(value.shape if dropped else value.shape[:-1]) != lead:
                return f"{self.name} of logits of several shapes"
            if value.columns != shape.columns and not (value.columns is None and not dropped):
                return f"{self.name} of several columns"
        if tuple(metas.shape if dropped else metas.shape[:-1]) != lead:
            return f"{self.name} to {tuple(metas.shape)}"
        if not dropped and shape.columns is not None and metas.shape[-1] != len(shape.columns):
            return f"{self.name} to {tuple(metas.shape)}"

        def aligned(value: Any) -> Any:
            if isinstance(value, DeferredLogits):
                return Value(value.place)
            return self._beside(value, lead, dropped, shape.columns) if value.dim() else value.detach()

        args, kwargs = tree_map_only(Tensor, aligned, (self.args, self.kwargs))
        return self._note(metas, shape.columns, dropped, args, kwargs)

    def _beside(self, value: Tensor, lead: tuple[int, ...], dropped: bool, columns: range | None) -> Any:
        value = value.detach().unsqueeze(-1) if dropped else value.detach()
        value = value[(None,) * (len(lead) + 1 - value.dim())]
        if all(size == 1 for size in value.shape[:-1]):
            return Beside(value.reshape(1, value.shape[-1]), columns)
        return Beside(value.expand(*lead, value.shape[-1]).reshape(-1, value.shape[-1]), columns)

    def _indexed(self, metas: Tensor) -> Any:
        x = self.first
        if self.args[0] is not x or x.dropped:
            return f"{self.name} by tensors"
        if self.name.startswith("index_fill"):
            dim, index, value = self.args[1] % x.dim(), self.args[2], self.args[3]
            indices: list[Any] = [None] * dim + [index]
        else:
            indices, value = list(self.args[1]), self.args[2] if len(self.args) > 2 else 0.0
            if len(self.args) > 3 and self.args[3]:
                return f"{self.name} that adds up"
        chosen = [index for index in indices if index is not None]
        mask = chosen[0] if len(chosen) == 1 else None
        single = not isinstance(value, Tensor) or value.numel() == 1
        if mask is None or not single:
            return f"{self.name} by several tensors"
        if self.name == "index":
            if len(indices) != x.dim() or mask.dim() != 1 or isinstance(mask, DeferredLogits):
                return f"{self.name} by tensors"
            return self._note(metas, None, False, (Value(x.place), [None, mask]), {}, across=True)
        if isinstance(value, DeferredLogits):
            return f"{self.name} of logits"
        scalar = value.reshape(()) if isinstance(value, Tensor) else value
        filled = torch.ops.aten.masked_fill_ if self.name.endswith("_") else torch.ops.aten.masked_fill
        if isinstance(mask, DeferredLogits):
            if mask.dtype != torch.bool or mask.shape != x.shape or mask.columns != x.columns:
                return f"{self.name} by logits"
            beside: Any = Value(mask.place)
        elif mask.dtype == torch.bool and mask.shape == x.shape:
            beside = self._beside(mask, tuple(x.shape[:-1]), False, x.columns)
        elif mask.dim() == 1 and len(indices) == x.dim() and x.columns is not None:
            beside = Ids(mask, x.columns)
        else:
            return f"{self.name} by tensors"
        overload = filled.Tensor if isinstance(scalar, Tensor) else filled.Scalar
        return self._note(metas, x.columns, False, (Value(x.place), beside, scalar), {}, overload)

    def _over_columns(self, metas: Any) -> Any:
        x = next((value for value in self.deferred if not value.dropped), self.first)
        lead = tuple(x.shape[:-1])
        if x.dropped or any(value.dropped or tuple(value.shape[:-1]) != lead for value in self.deferred):
            return f"{self.name} of tokens"
        args, kwargs = list(self.args), dict(self.kwargs)
        drops = False
        if self.name in ("mm", "addmm"):
            if self.args[0 if self.name == "mm" else 1] is not x or len(self.deferred) > 1:
                return f"{self.name} of tokens"
        elif self.name == "constant_pad_nd":
            if len(args[1]) != 2:
                return f"{self.name} of tokens"
        else:
            names = [declared.name for declared in self.schema.arguments]
            if "dim" not in names:
                return f"{self.name} over all tokens"
            place = names.index("dim")
            declared = self.schema.arguments[place]
            dim = args[place] if place < len(args) else kwargs.get("dim", declared.default_value)
            dims = list(dim) if isinstance(dim, (list, tuple)) else [dim]
            if not dims or None in dims or [one % x.dim() for one in dims] != [x.dim() - 1]:
                return f"{self.name} over tokens"
            last: Any = [-1] if isinstance(dim, (list, tuple)) else -1
            if place < len(args):
                args[place] = last
            else:
                kwargs["dim"] = last
            keep = names.index("keepdim") if "keepdim" in names else None
            drops = keep is not None and not (args[keep] if keep < len(args) else kwargs.get("keepdim", False))

        def aligned(value: Any) -> Any:
            if isinstance(value, DeferredLogits):
                return Value(value.place)
            if self.name in ("mm", "addmm", "index_select") or not value.dim():
                return value.detach()
            return Beside(value.detach().expand(*lead, value.shape[-1]).reshape(-1, value.shape[-1]), None)

        args, kwargs = tree_map_only(Tensor, aligned, (tuple(args), kwargs))
        return self._note(metas, None, drops, args, kwargs, drops=drops, across=True)


# --- find what a model does to its logits behind its head


@dataclass(frozen=True)
class Tail:
    """What was seen between head and logits.

    Attributes:
        steps: the operators, in order, in words.
        obstacle: what cannot be done to some tokens at a time; "" if nothing.
        across: what cannot be done to some columns of the vocabulary at a time.
    """

    steps: tuple[str, ...] = ()
    obstacle: str = ""
    across: str = ""

    @property
    def obstacle_if_cut(self) -> str:
        """What cannot be done where ranks share the vocabulary."""
        return self.obstacle or self.across


def find_tail(model: nn.Module, head: str, inputs: Mapping[str, Any]) -> Tail:
    """Observe forwards in both modes, at two lengths; the steps are those of the first.

    Each step of a training observes its own forward anew. This one finds what is refused before the first step.
    """
    copy, found = copy_of(model), list[Tail]()
    # a weight that begins at zero hides nothing: no values are looked at
    for training in (True, False):
        copy.train(training)
        for length in (SEQ, SEQ // 2):
            arguments = {
                key: value[:, :length] if isinstance(value, Tensor) and value.dim() == 2 else value
                for key, value in inputs.items()
            }
            with torch.random.fork_rng(devices=()):
                found.append(_observed(copy, head, arguments))
    first = found[0]
    obstacle = next((tail.obstacle for tail in found if tail.obstacle), "")
    return Tail(first.steps, obstacle, next((tail.across for tail in found if tail.across), ""))


def _observed(model: nn.Module, head: str, inputs: Mapping[str, Any]) -> Tail:
    tapes: list[LogitsTape] = []

    def deferred(path: str, module: nn.Module, args: tuple, kwargs: dict[str, Any], output: Tensor) -> Tensor:
        tape, logits = begin(output, output.shape[-1])
        tapes.append(tape)
        return logits

    try:
        with watching([(head, model.get_submodule(head))], after=deferred):
            logits = logits_of(model(**inputs))
            logits = tapes[-1].finish(logits)
        return Tail(tapes[-1].shown(logits), across=tapes[-1].obstacle(logits, cut=True))
    except UnsupportedError as refusal:
        return Tail(obstacle=str(refusal))
    except Exception as error:  # noqa: BLE001  whatever a model's code or torch raises of tensors without values
        return Tail(obstacle=f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}")
