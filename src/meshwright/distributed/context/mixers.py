"""Compute modules in which tokens meet otherwise than in attention, for rows cut over ranks.

A module is given whole rows and keeps its own tokens of what it returns, or computes a share of its heads: what its
first layers give of a rank's own tokens is traded for whole rows of that share, and back before its last layer.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from meshwright.core.calls import argument, holding, with_arguments, without_values
from meshwright.core.devices import to_device
from meshwright.core.errors import UnsupportedError
from meshwright.core.names import owner
from meshwright.core.parts import FusedPart, ranges, take
from meshwright.core.record import wrap
from meshwright.core.torch_private import (
    has_no_values,
    tensors_by_path,
    tree_map_with_path,
    uncompiled,
    version_of,
)
from meshwright.distributed.exchange.ranks import RankGroup
from meshwright.introspection.mixing.interception import not_intercepted
from meshwright.introspection.mixing.masks import TokenMask
from meshwright.introspection.mixing.values import Mixer, Mixing
from meshwright.introspection.structure.local_form import LocalArgument, counting_locally, share_of
from meshwright.planning.context.mixers import HeadTrade, MixerPlan, key_in_arguments

from .attention import gather_tokens
from .kernels.fused import wide
from .pairs import PairArguments
from .rows import CutRows, place, select


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
    if planned.trade is None:
        _wrap_whole(module, planned, runtime)
    else:
        _Traded(model, module, planned, planned.trade, runtime).wrap()


# --- whole rows on every rank


def _wrap_whole(module: nn.Module, planned: MixerPlan, runtime: RowsInUse) -> None:
    def make(forward: Callable[..., Any]) -> Callable[..., Any]:
        @uncompiled  # rows change with each microbatch
        def whole_rows_forward(*args: Any, **kwargs: Any) -> Any:
            rows = runtime.rows
            if rows is None:
                return forward(*args, **kwargs)
            with not_intercepted(module, runtime.mixing.implementation):
                return _whole(forward, args, kwargs, planned.mixer, rows, runtime)

        return whole_rows_forward

    wrap(module, make, f"whole rows of cp {runtime.group.size}")


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


def _whole_padding(leaf: Tensor, key: str, mixer: Mixer, rows: CutRows) -> Tensor | None:
    """Return the padding mask of whole rows for a rank's part, or for their end, which models take who count tokens.

    Raises:
        UnsupportedError: the tensor is another one.
    """
    if has_no_values(leaf) and leaf.dim() == 2:
        return None  # models leave out a mask that is all ones where they see its values
    whole, of, version = rows.memo.get("whole padding", (None, lambda: None, 0))
    if of() is not leaf or version != version_of(leaf):  # layers are given one tensor, which is read once
        padding = torch.ones((len(leaf), rows.length)) if rows.padding is None else rows.padding
        whole = to_device(padding, leaf.device).to(leaf.dtype)
        parts = [whole[:, rows.length - leaf.shape[1] :], rows.take(whole)]
        if leaf.dim() != 2 or not any(torch.equal(leaf, part) for part in parts):
            raise UnsupportedError(
                f"{mixer.path} needs whole rows, and is given {tuple(leaf.shape)} as {key}, which it was not given when"
                f" it was measured"
            )
        rows.memo["whole padding"] = whole, weakref.ref(leaf), version_of(leaf)
    return whole


def _gathered(
    leaf: Tensor | TokenMask, key: str, mixer: Mixer, rows: CutRows, runtime: RowsInUse
) -> Tensor | TokenMask | None:
    """Return one argument for whole rows: gathered, made anew, or without values where only its shape is read.

    Raises:
        UnsupportedError: it has other tokens than this rank's, or was not there when the module was measured.
    """
    if key in mixer.pairs and runtime.pairs is not None:
        return runtime.pairs.given(mixer.path, key, leaf, rows)
    if not isinstance(leaf, Tensor):
        return leaf
    own, known = rows.counts[rows.rank], {each.key: each for each in mixer.inputs}
    if key not in known:
        has_tokens = leaf.dim() > 1 and own in leaf.shape[1:] and rows.length not in leaf.shape[1:]
        return _whole_padding(leaf, key, mixer, rows) if has_tokens else leaf
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
        block = self.model.get_submodule(self.trade.block)
        region = self.trade.region
        for layer in region.producers:
            wrap(block.get_submodule(layer), self._begins(self.trade.cut_of(layer)), "gives whole rows of its heads")
        end = self.trade.cut_of(region.consumer)
        wrap(block.get_submodule(region.consumer), self._ends(end), "takes its own tokens of all heads")
        wrap(self.module, self._around(block), f"heads of cp {self.runtime.group.size}")

    def _around(self, block: nn.Module) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        form, group = self.trade.form, self.runtime.group
        numbers = [(block.get_submodule(number.module), number) for number in form.numbers]
        cuts = [(block.get_submodule(owner(cut.name)), cut) for cut in self.trade.inner_cuts()]

        def shares() -> Iterator[holding]:
            for module, cut in cuts:
                name = cut.name.rpartition(".")[2]
                yield holding(module, {name: take(_tensor(module, name), cut.dim, cut.parts, group.rank, group.size)})

        def make(forward: Callable[..., Any]) -> Callable[..., Any]:
            @uncompiled
            def heads_forward(*args: Any, **kwargs: Any) -> Any:
                rows = self.runtime.rows
                if rows is None:
                    return forward(*args, **kwargs)
                if not self._is_as_measured(args, kwargs):
                    return _whole(forward, args, kwargs, self.planned.mixer, rows, self.runtime)
                args, kwargs, self.own = self._arguments(args, kwargs, rows)
                try:
                    with counting_locally(numbers), ExitStack() as stack:
                        for share in shares():
                            stack.enter_context(share)
                        return forward(*args, **kwargs)
                finally:
                    self.own = None

            return heads_forward

        return make

    def _is_as_measured(self, args: tuple, kwargs: dict[str, Any]) -> bool:
        """Return whether there are no other tensors than those that were there when heads were measured."""
        known = {*(each.key for each in self.planned.mixer.inputs), *self.planned.mixer.pairs}
        return all(path in known or has_no_values(leaf) for path, leaf in tensors_by_path((args, kwargs)).items())

    def _arguments(
        self, args: tuple, kwargs: dict[str, Any], rows: CutRows
    ) -> tuple[tuple, dict[str, Any], tuple[Tensor, Tensor]]:
        """Return the arguments of whole rows, in which the input has no values, and (that input, this rank's)."""
        form, group = self.trade.form, self.runtime.group
        own = argument(args, kwargs, form.hidden[0])
        features = own.shape[-1] // (group.size if form.narrow else 1)
        made = without_values(own, (own.shape[0], rows.length, *own.shape[2:-1], features))
        hidden, behind = (set(map(key_in_arguments, keys)) for keys in (form.hidden, form.behind))

        def given(key: str, leaf: Any) -> Any:
            if key in hidden:
                return made
            return leaf if key in behind else _gathered(leaf, key, self.planned.mixer, rows, self.runtime)

        args, kwargs = _with_leaves((args, kwargs), given)
        shared = {each.key: self._share(argument(args, kwargs, each.key), each, len(own)) for each in form.arguments}
        args, kwargs = with_arguments(args, kwargs, shared)
        return args, kwargs, (made, own)

    def _share(self, whole: Tensor, of: LocalArgument, rows: int) -> Tensor:
        """Return this rank's share of an argument, of which a tensor axis takes its share afterwards."""
        group, tensor_ranks = self.runtime.group, self.trade.tensor_ranks
        outer = rows * tensor_ranks if of.by_row else tensor_ranks
        return share_of(whole, replace(of, by_row=outer > 1), outer, group.rank, group.size)

    def _begins(self, parts: Sequence[FusedPart]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        def make(forward: Callable[..., Any]) -> Callable[..., Any]:
            def own_tokens_forward(x: Tensor) -> Tensor:
                if self.own is None:
                    return forward(x)
                made, own = self.own
                if x is not made:
                    raise UnsupportedError(
                        f"{self.planned.mixer.path} changes its input before its first layers, as it did not when it"
                        f" was measured. Set layout.cp = 1"
                    )
                assert self.runtime.rows is not None
                return _ShareOfFeatures.apply(forward(own), parts, self.runtime.rows, self.runtime.group)

            return own_tokens_forward

        return make

    def _ends(self, parts: Sequence[FusedPart]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        def make(forward: Callable[..., Any]) -> Callable[..., Any]:
            def own_tokens_forward(x: Tensor) -> Tensor:
                if self.own is None:
                    return forward(x)
                assert self.runtime.rows is not None
                return forward(_AllFeatures.apply(x, parts, self.runtime.rows, self.runtime.group))

            return own_tokens_forward

        return make


def _tensor(module: nn.Module, name: str) -> Tensor:
    """Return a parameter or buffer as the module sees it now."""
    found = module.__dict__.get(name)
    found = module._parameters.get(name) if found is None else found
    found = module._buffers.get(name) if found is None else found
    assert found is not None
    return found


class _ShareOfFeatures(torch.autograd.Function):
    """(rows, own tokens, features) -> (rows, length, this rank's share of the features)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, parts: Sequence[FusedPart], rows: CutRows, group: RankGroup) -> Tensor:
        ctx.of = parts, rows, group, x.shape[-1]
        return _share(x, parts, rows, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        parts, rows, group, features = ctx.of
        return _joined(gradients[0], parts, rows, group, features), None, None, None


class _AllFeatures(torch.autograd.Function):
    """(rows, length, this rank's share of the features) -> (rows, own tokens, features)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, parts: Sequence[FusedPart], rows: CutRows, group: RankGroup) -> Tensor:
        ctx.of = parts, rows, group
        return _joined(x, parts, rows, group, sum(part.size for part in parts))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        return _share(gradients[0], *ctx.of), None, None, None


def _share(x: Tensor, parts: Sequence[FusedPart], rows: CutRows, group: RankGroup) -> Tensor:
    """Send each rank its share of the features of own tokens, and put whole rows of this rank's share together."""
    count = len(x)
    shares = [take(x, -1, parts, rank, group.size) for rank in range(group.size)]
    mine = shares[group.rank].shape[-1]
    receives = [count * tokens * mine for tokens in rows.counts]
    received = group.trade(torch.cat([share.flatten() for share in shares]), [s.numel() for s in shares], receives)
    made = x.new_empty((count, rows.length, mine))
    for rank, part in enumerate(received.split(receives)):
        place(made, rows.places_of(rank), 1, part.view(count, -1, mine))
    return made


def _joined(x: Tensor, parts: Sequence[FusedPart], rows: CutRows, group: RankGroup, features: int) -> Tensor:
    """Send each rank its tokens of this rank's share of the features, and sum up the shares of own tokens."""
    count = len(x)
    own = rows.counts[rows.rank]
    sent = [select(x, rows.places_of(rank), 1) for rank in range(group.size)]
    held = [ranges(parts, rank, group.size) for rank in range(group.size)]
    widths = [sum(high - low for low, high in found) for found in held]
    receives = [count * own * width for width in widths]
    received = group.trade(torch.cat([part.flatten() for part in sent]), [p.numel() for p in sent], receives)
    has_copies = sum(widths) != features
    made = x.new_zeros((count, own, features), dtype=wide(x[:0]).dtype if has_copies else x.dtype)
    for part, found, width in zip(received.split(receives), held, widths, strict=True):
        pieces = part.view(count, own, width).split([high - low for low, high in found], dim=-1)
        for piece, (low, high) in zip(pieces, found, strict=True):
            made[..., low:high] += piece
    return made.to(x.dtype)
