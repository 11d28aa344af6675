"""Wrap modules that compute with whole rows: those in which tokens meet otherwise than in attention, or are counted.

A mixer is given whole rows and keeps its own tokens of what it returns, or computes a share of its heads: what its
first layers give of a rank's own tokens is traded for whole rows of that share, and back before its last layer.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from meshwright.core.devices import to_device
from meshwright.core.errors import ConfigError, UnsupportedError
from meshwright.core.names import owner
from meshwright.core.parts import FusedPart, take
from meshwright.core.record import argument, holding, with_arguments, without_values, wrap
from meshwright.core.torch_private import has_no_values, tensors_by_path, tree_map_with_path, uncompiled, version_of
from meshwright.distributed.exchange import RankGroup
from meshwright.introspection.logits_tape import model_line, shown
from meshwright.introspection.mixing.interception import not_intercepted
from meshwright.introspection.mixing.masks import TokenMask
from meshwright.introspection.mixing.values import (
    LengthUse,
    Mixer,
    Mixing,
    ends_of_range,
    in_words,
    runs_of,
    scanned,
    value_of,
)
from meshwright.introspection.structure.local_search import counting_locally, share_of
from meshwright.planning.context.plan import HeadTrade, MixerPlan, key_in_arguments

from .methods import gather_tokens, members_of, trade
from .rows import PLACES, CutRows, PairArguments, kept_on, select

# --- whole rows on every rank


class RowsInUse(Protocol):
    """Gives mixers the ranks, and the rows of the microbatch that is computed now."""

    group: RankGroup
    rows: CutRows | None
    mixing: Mixing
    pairs: PairArguments | None


def wrap_mixer(model: nn.Module, planned: MixerPlan, runtime: RowsInUse) -> None:
    """Let one module of a model compute whole rows.

    Raises (in its forward):
        UnsupportedError: it is given other tensors of this rank's tokens than those that were measured.
    """
    module = model.get_submodule(planned.mixer.path)
    if planned.trade is not None:
        _Traded(model, module, planned, planned.trade, runtime).wrap()
        return

    forward = module.forward

    @uncompiled  # rows change with each microbatch
    def whole_rows_forward(*args: Any, **kwargs: Any) -> Any:
        rows = runtime.rows
        if rows is None:
            return forward(*args, **kwargs)
        with not_intercepted(module, runtime.mixing.implementation):
            return _whole(forward, args, kwargs, planned.mixer, rows, runtime)

    wrap(module, whole_rows_forward, f"whole rows of cp {runtime.group.size}")


def _whole(
    forward: Callable[..., Any], args: tuple, kwargs: dict[str, Any], mixer: Mixer, rows: CutRows, runtime: RowsInUse
) -> Any:
    args, kwargs = _with_leaves((args, kwargs), lambda key, leaf: _gathered(leaf, key, mixer, rows, runtime))
    dims = {each.key: each.dim for each in mixer.outputs}

    def own(key: str, leaf: Any) -> Any:
        if key in dims and leaf.shape[dims[key]] == rows.length:
            return select(leaf, rows.own, dims[key])
        return leaf

    return _with_leaves(forward(*args, **kwargs), own)


def _with_leaves(value: Any, change: Callable[[str, Any], Any]) -> Any:
    """Return a value with the tensors and masks inside it changed, by their paths."""
    kinds = (Tensor, TokenMask)
    return tree_map_with_path(lambda path, leaf: change(path, leaf) if isinstance(leaf, kinds) else leaf, value)


def _gathered(
    leaf: Tensor | TokenMask, key: str, mixer: Mixer, rows: CutRows, runtime: RowsInUse
) -> Tensor | TokenMask | None:
    """Return one argument for whole rows: gathered, made anew, or without values where only its shape is read."""
    if key in mixer.pairs and runtime.pairs is not None:
        return runtime.pairs.given(mixer.path, key, leaf, rows)
    if not isinstance(leaf, Tensor):
        return leaf
    own, known = rows.counts[rows.rank], {each.key: each for each in mixer.inputs}
    if key not in known:
        if leaf.dim() < 2 or own not in leaf.shape[1:] or rows.length in leaf.shape[1:]:
            return leaf
        if has_no_values(leaf) and leaf.dim() == 2:
            return None  # models leave out a mask that is all ones where they see its values
        # the padding mask of a rank's part, or of its end, which models take who count tokens
        whole, of, version = rows.memo.get("whole padding", (None, lambda: None, 0))
        if of() is not leaf or version != version_of(leaf):  # layers are given one tensor, which is read once
            padding = torch.ones((len(leaf), rows.length)) if rows.padding is None else rows.padding
            whole = to_device(padding, leaf.device).to(leaf.dtype)
            parts = [whole[:, rows.length - leaf.shape[1] :], rows.take(whole)]
            if leaf.dim() != 2 or not any(torch.equal(leaf, part) for part in parts):
                raise UnsupportedError(
                    f"{mixer.path} needs whole rows, and is given {tuple(leaf.shape)} as {key}, which it was not given"
                    f" when it was measured"
                )
            rows.memo["whole padding"] = whole, weakref.ref(leaf), version_of(leaf)
        return whole
    dim = known[key].dim
    if leaf.shape[dim] == rows.length:
        return leaf
    if known[key].is_read and leaf.shape[dim] != own:
        raise UnsupportedError(
            f"{mixer.path} needs whole rows, and is given {tuple(leaf.shape)} as {key}, where dim {dim} should have"
            f" this rank's {own} tokens of a row of {rows.length}"
        )
    if not known[key].is_read:
        return without_values(leaf, (*leaf.shape[:dim], rows.length, *leaf.shape[dim + 1 :]))
    if len(leaf) < len(rows.places[0]):
        leaf = leaf.expand(len(rows.places[0]), *leaf.shape[1:])
    moved = leaf.movedim(dim, 1)
    flat = gather_tokens(moved.reshape(len(leaf), 1, own, -1), rows, runtime.group)
    return flat.reshape(len(leaf), rows.length, *moved.shape[2:]).movedim(1, dim)


# --- heads for tokens


@dataclass
class _Traded:
    """A mixer of which each rank computes some heads.

    Attributes:
        own: while its forward runs, (what stands in for the input of whole rows, the input of this rank's tokens).
    """

    model: nn.Module
    module: nn.Module
    planned: MixerPlan
    trade: HeadTrade
    runtime: RowsInUse
    own: tuple[Tensor, Tensor] | None = field(default=None, init=False)

    def wrap(self) -> None:
        block, region = self.model.get_submodule(self.trade.block), self.trade.region

        def wrap_producer(layer: nn.Module, parts: Sequence[FusedPart]) -> None:
            to_layer = layer.forward

            def own_tokens_forward(x: Tensor) -> Tensor:
                if self.own is None:
                    return to_layer(x)
                made, own = self.own
                if x is not made:
                    raise UnsupportedError(
                        f"{self.planned.mixer.path} changes its input before its first layers, as it did not when it"
                        f" was measured. Set layout.cp = 1"
                    )
                return self._traded(to_layer(own), parts, to_heads=True)

            wrap(layer, own_tokens_forward, "gives whole rows of its heads")

        for path in region.producers:
            wrap_producer(block.get_submodule(path), self.trade.cut_of(path))
        consumer, parts = block.get_submodule(region.consumer), self.trade.cut_of(region.consumer)
        to_consumer = consumer.forward

        def all_heads_forward(x: Tensor) -> Tensor:
            return to_consumer(x if self.own is None else self._traded(x, parts, to_heads=False))

        wrap(consumer, all_heads_forward, "takes its own tokens of all heads")

        form, group, mixer = self.trade.form, self.runtime.group, self.planned.mixer
        numbers = [(block.get_submodule(number.module), number) for number in form.numbers]
        cuts = [(block.get_submodule(owner(cut.name)), cut) for cut in self.trade.inner_cuts()]
        known = {*(each.key for each in mixer.inputs), *mixer.pairs}
        forward = self.module.forward

        @uncompiled
        def heads_forward(*args: Any, **kwargs: Any) -> Any:
            rows = self.runtime.rows
            if rows is None:
                return forward(*args, **kwargs)
            leaves = tensors_by_path((args, kwargs)).items()
            if not all(path in known or has_no_values(leaf) for path, leaf in leaves):  # others than were measured
                return _whole(forward, args, kwargs, mixer, rows, self.runtime)
            args, kwargs, self.own = self._arguments(args, kwargs, rows)
            try:
                with counting_locally(numbers), ExitStack() as stack:
                    for module, cut in cuts:
                        name = cut.name.rpartition(".")[2]
                        # a parameter or buffer as the module sees it now
                        seen = [x.get(name) for x in (module.__dict__, module._parameters, module._buffers)]
                        tensor = next(x for x in seen if x is not None)
                        share = take(tensor, cut.dim, cut.parts, group.rank, group.size)
                        stack.enter_context(holding(module, {name: share}))
                    return forward(*args, **kwargs)
            finally:
                self.own = None

        wrap(self.module, heads_forward, f"heads of cp {group.size}")

    def _arguments(
        self, args: tuple, kwargs: dict[str, Any], rows: CutRows
    ) -> tuple[tuple, dict[str, Any], tuple[Tensor, Tensor]]:
        """Return the arguments of whole rows, in which the input has no values, and (that input, this rank's)."""
        form, group, tensor_ranks = self.trade.form, self.runtime.group, self.trade.tensor_ranks
        own = argument(args, kwargs, form.hidden[0])
        features = own.shape[-1] // (group.size if form.narrow else 1)
        made = without_values(own, (own.shape[0], rows.length, *own.shape[2:-1], features))
        hidden, behind = (set(map(key_in_arguments, keys)) for keys in (form.hidden, form.behind))

        def given(key: str, leaf: Any) -> Any:
            if key in hidden:
                return made
            return leaf if key in behind else _gathered(leaf, key, self.planned.mixer, rows, self.runtime)

        args, kwargs = _with_leaves((args, kwargs), given)
        shared: dict[int | str, Tensor] = {}
        for each in form.arguments:  # this rank's share, of which a tensor axis takes its share afterwards
            outer = len(own) * tensor_ranks if each.by_row else tensor_ranks
            whole = argument(args, kwargs, each.key)
            shared[each.key] = share_of(whole, replace(each, by_row=outer > 1), outer, group.rank, group.size)
        args, kwargs = with_arguments(args, kwargs, shared)
        return args, kwargs, (made, own)

    def _traded(self, x: Tensor, parts: Sequence[FusedPart], *, to_heads: bool) -> Tensor:
        """(rows, own tokens, features) -> (rows, length, this rank's share of the features), or back.

        Features are traded as heads: runs of as many features as divide the shares of all parts.
        """
        group, rows = self.runtime.group, self.runtime.rows
        assert rows is not None
        held = [[part.range_of(rank, group.size) for rank in range(group.size)] for part in parts]
        unit = math.gcd(*(part.size for part in parts), *chain.from_iterable(chain.from_iterable(held)))
        shares = tuple([tuple([range(low // unit, high // unit) for low, high in part]) for part in held])
        here = [part.size // unit for part in parts] if to_heads else [len(own[group.rank]) for own in shares]
        heads = x.unflatten(-1, (-1, unit)).transpose(1, 2)  # (rows, heads, tokens, unit)
        members = members_of(group, rows, 0, group.size)
        made = trade(heads.split(here, dim=1), shares, members, to_heads=to_heads)
        return torch.cat(made, dim=1).transpose(1, 2).flatten(2)


# --- count this rank's tokens by their places in whole rows


def wrap_counting(module: nn.Module, uses: Iterable[LengthUse], runtime: RowsInUse) -> None:
    """Let a module's forward count this rank's tokens by their places in whole rows."""
    lines = {(use.file, use.line): use.kind for use in uses}

    forward = module.forward

    @uncompiled  # rows change with each microbatch
    def counting_forward(*args: Any, **kwargs: Any) -> Any:
        if runtime.rows is None:
            return forward(*args, **kwargs)
        with _OwnPlaces(lines, runtime.rows, runtime.group):
            return forward(*args, **kwargs)

    wrap(module, counting_forward, f"positions of cp {runtime.group.size}")


class _OwnPlaces(TorchFunctionMode):
    def __init__(self, lines: dict[tuple[str, int], str], rows: CutRows, group: RankGroup):
        super().__init__()
        self.lines, self.rows, self.group, self.own = lines, rows, group, rows.counts[rows.rank]

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.arange:
            start, end = ends_of_range(args, kwargs)
            if end - start == self.own and self.lines.get(model_line(__file__)) == "positions":
                counted = func(*args, **kwargs)
                return counted if has_no_values(counted) else self._places(counted.device).to(counted.dtype) + start
        elif (x := scanned(func, args, kwargs)) is not None and not has_no_values(x):
            if x.size(1) == self.own and self.lines.get(model_line(__file__)) == "scan":
                whole = gather_tokens(x[:, None, :, None], self.rows, self.group)[:, 0, :, 0]
                return select(torch.cumsum(whole, 1, dtype=kwargs.get("dtype")), self.rows.own, 1)
        elif func is Tensor.__getitem__ and not has_no_values(args[0]):
            x, index = args
            runs = {dim: run for dim, run in runs_of(x, index).items() if run.stop - (run.start or 0) == self.own}
            if runs and self.lines.get(model_line(__file__)) == "table":
                for dim, run in runs.items():
                    size, start = x.size(dim), run.start or 0
                    if size == self.own and not isinstance(x, nn.Parameter):
                        continue  # it has this rank's tokens alone
                    if size < start + self.rows.length:
                        raise UnsupportedError(
                            f"a table of {size} positions is read for rows of {self.rows.length} tokens at"
                            f" {shown(*model_line(__file__))}: bring rows of at most {size - start} tokens, or make the"
                            f" table longer"
                        )
                    x = torch.index_select(x, dim, self._places(x.device) + start)
                whole = slice(None)
                items = index if isinstance(index, tuple) else (index,)
                return func(x, tuple(whole if any(item is run for run in runs.values()) else item for item in items))
        return func(*args, **kwargs)

    def _places(self, device: torch.device) -> Tensor:
        """Return (own tokens,) int64, the same for all rows (``refuse_other_rows``)."""
        return kept_on(self.rows.own, device)[0]


def part_of_another_case(condition: LengthUse, length: int, parts: Iterable[int]) -> int | None:
    """Return the first of the parts' numbers of tokens at which the condition is not what it is at ``length``."""

    def case(length: int) -> bool | None:
        try:
            return value_of(condition.expression, length)
        except ArithmeticError:
            return None

    return next((part for part in parts if case(part) != case(length)), None)


def refuse_other_rows(mixing: Mixing, rows: CutRows) -> None:
    """Refuse, on all ranks alike, rows of which parts are another case to the model, or are counted otherwise."""
    for use in mixing.lengths:
        if use.kind in ("positions", "table") and rows.places.shape[1] > 1:
            raise ConfigError(
                f"batch['{PLACES}'] differs from row to row, and the model counts the tokens of all rows alike at"
                f" {shown(use.file, use.line)}: cut all rows of a batch at the same places"
            )
        if use.kind == "condition":
            part = part_of_another_case(use, rows.length, rows.counts)
            if part is not None:
                raise UnsupportedError(
                    f"the model decides by the length of a row at {shown(use.file, use.line)} (is"
                    f" {in_words(use.expression)}?), and would do so by the {part} tokens of a rank instead of"
                    f" {rows.length}. Decide by an attribute of the model instead, or set layout.cp = 1."
                )
