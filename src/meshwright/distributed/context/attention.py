"""Attend to whole rows, of which each rank has a part, and compute modules in which tokens meet otherwise.

A module is given whole rows and keeps its own tokens of what it returns, or computes a share of its heads: what its
first layers give of a rank's own tokens is traded for whole rows of that share, and back before its last layer.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor, nn

from meshwright.core.devices import to_device
from meshwright.core.errors import UnsupportedError
from meshwright.core.names import owner
from meshwright.core.parts import FusedPart, ranges, take
from meshwright.core.record import argument, holding, with_arguments, without_values, wrap
from meshwright.core.torch_private import (
    has_no_values,
    tensors_by_path,
    tree_map_with_path,
    uncompiled,
    version_of,
)
from meshwright.distributed.exchange.ranks import RankGroup
from meshwright.introspection.mixing.arithmetic import scale_of
from meshwright.introspection.mixing.interception import AttentionCall, not_intercepted
from meshwright.introspection.mixing.masks import TokenMask
from meshwright.introspection.mixing.reach import KeyRanges, RowMask
from meshwright.introspection.mixing.values import Arithmetic, Mixer, Mixing
from meshwright.introspection.structure.local_search import LocalArgument, counting_locally, share_of
from meshwright.planning.context.plan import HeadTrade, Method, MixerPlan, is_divisible, key_in_arguments

from .kernels import Scores, block_attention, wide
from .methods import (
    Exchange,
    Gathered,
    Halo,
    Members,
    Reached,
    Ring,
    arriving_attention,
    ring_attention,
    shares_of_heads,
    to_heads,
    to_tokens,
)
from .rows import CutRows, PairArguments, kept_on, on_device, place, select

# --- attend to the tokens of whole rows, of which each rank has a part

Made = TypeVar("Made")


@dataclass(frozen=True, eq=False)
class Context:
    """Where the tokens of a microbatch lie, and how far each attends by one mask.

    Attributes:
        reach: of all tokens of whole rows.
    """

    group: RankGroup
    rows: CutRows
    reach: KeyRanges

    @property
    def own_reach(self) -> KeyRanges:
        """The reach of this rank's queries, by places."""
        return self.once("own reach", lambda: self.reach.take(self.rows.own))

    def once(self, what: Any, make: Callable[[], Made]) -> Made:
        """Return what follows from the reach and from where the tokens lie, which the microbatch's layers share."""
        memo, key = self.rows.memo, (self.reach, what)
        if key not in memo:
            memo[key] = make()
        return memo[key]


def attend(call: AttentionCall, context: Context, arithmetic: Arithmetic, method: Method) -> Tensor:
    """Compute a call whose keys lie on all ranks: (rows, heads, own queries, features)."""
    cap = call.extras[arithmetic.cap] if arithmetic.cap else None
    scores = Scores(scale_of(call), cap, bool(arithmetic.sinks))
    neighbours = method.neighbours
    if not is_divisible(call.query.shape[1], call.key.shape[1], neighbours):
        neighbours = 1  # a small copy has fewer heads than its model
    if method.kind == "halo" or _is_less_by_halo(call, context, method):
        found = _arriving(call, context, _halo(call, context), scores)
    elif method.kind == "all_gather":
        gathered = context.once("gathered", partial(Gathered.of, context.group, context.rows))
        found = _arriving(call, context, gathered, scores)
    elif neighbours == 1:
        found = _passed(call, context, scores)
    else:
        return _traded(call, context, scores, arithmetic, neighbours)
    output, logarithm = found
    return _finished(call, arithmetic, output, logarithm, range(call.query.shape[1]))


def attend_to_whole_rows(call: AttentionCall, mask: RowMask, rows: CutRows, group: RankGroup) -> Tensor:
    """Compute a call as the model does, with keys and values of whole rows, and a mask of all queries and keys."""
    key, value = gather_keys(call.key, call.value, rows, group)
    device = call.query.device
    dense = on_device(mask, rows, device).dense(kept_on(rows.own, device), rows.length, len(call.query))
    return call.compute(call.query, key, value, dense, False)


def _finished(call: AttentionCall, arithmetic: Arithmetic, output: Tensor, logarithm: Tensor, heads: range) -> Tensor:
    """Give sinks their share, one more score for each of these heads, and return the dtype of queries."""
    if arithmetic.sinks:
        sink = call.extras[arithmetic.sinks][heads.start : heads.stop].to(logarithm.dtype)
        output = output * torch.sigmoid(logarithm - sink[None, :, None])[..., None]
    return output.to(call.query.dtype)


def _halo(call: AttentionCall, context: Context) -> Halo:
    return context.once("halo", lambda: Halo.of(context.group, context.rows, context.reach, len(call.query)))


def _is_less_by_halo(call: AttentionCall, context: Context, method: Method) -> bool:
    """Return whether rows of several documents move fewer bytes by a halo, on the rank that sends most."""
    rows = context.rows
    if method.asked or method.kind == "halo" or not rows.has_documents:
        return False
    size = call.key.element_size() + wide(call.key[:0]).element_size()
    each = call.key.shape[1] * (call.key.shape[3] + call.value.shape[3]) * size
    return _halo(call, context).most * each < len(call.query) * max(rows.counts) * method.bytes


def _arriving(call: AttentionCall, context: Context, exchange: Exchange, scores: Scores) -> tuple[Tensor, Tensor]:
    own = context.rows.own
    reached = context.once(exchange, lambda: Reached.of(context.own_reach, own, exchange.places))
    return arriving_attention(call.query, call.key, call.value, exchange, reached, scores)


def _passed(call: AttentionCall, context: Context, scores: Scores) -> tuple[Tensor, Tensor]:
    rows = context.rows
    ring = context.once("ring", lambda: Ring(context.group, rows.rank, rows.of_ranks))
    reaches = context.once(ring, lambda: ring.reaches(context.own_reach))
    return ring_attention(call.query, call.key, call.value, ring, reaches, scores)


def _traded(call: AttentionCall, context: Context, scores: Scores, arithmetic: Arithmetic, neighbours: int) -> Tensor:
    """Trade tokens for heads among neighbours, let keys and values go round the rest, and trade back."""
    group, rows = context.group, context.rows
    everyone = context.once(
        ("members", neighbours),
        lambda: [Members.of(group, rows, first, neighbours) for first in range(0, group.size, neighbours)],
    )
    position = group.rank // neighbours
    members = everyone[position]
    heads, key_heads = shares_of_heads(call.query.shape[1], call.key.shape[1], neighbours)
    shares = (heads, key_heads, key_heads)
    query, key, value = to_heads((call.query, call.key, call.value), shares, members)
    reach = context.once(members, lambda: context.reach.take(members.places))
    if len(everyone) == 1:
        found = block_attention(query, key, value, reach, scores)
    else:
        places = tuple(each.places for each in everyone)
        ring = context.once(("ring", neighbours), lambda: Ring(group, position, places, neighbours))
        found = ring_attention(query, key, value, ring, context.once(ring, lambda: ring.reaches(reach)), scores)
    output, logarithm = found
    output = _finished(call, arithmetic, output, logarithm, heads[group.rank - members.first])
    return to_tokens(output, heads, members)


def gather_tokens(x: Tensor, rows: CutRows, group: RankGroup) -> Tensor:
    """Return (rows, heads, own tokens, features) of each rank -> (rows, heads, length, features), in a row's order.

    The backward sums what all ranks hand to each token, in at least fp32.
    """
    return _GatheredTokens.apply(x, rows, group)  # type: ignore[no-any-return]


class _GatheredTokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, rows: CutRows, group: RankGroup) -> Tensor:
        ctx.rows, ctx.group = rows, group
        missing = rows.most - x.shape[2]
        filled = torch.cat((x, x.new_zeros((*x.shape[:2], missing, x.shape[3]))), dim=2) if missing else x
        parts = group.gather_features(filled.contiguous())  # (ranks, rows, heads, most, features)
        joined = parts.permute(1, 2, 0, 3, 4).flatten(2, 3)
        return select(joined, rows.slots, 2)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        rows, (gradient,) = ctx.rows, gradients
        wide = gradient.to(torch.promote_types(gradient.dtype, torch.float32))
        parts = wide.new_zeros((len(wide), ctx.group.size, rows.most, wide.shape[1], wide.shape[3]))
        for rank, count in enumerate(rows.counts):
            parts[:, rank, :count] = select(wide, rows.places_of(rank), 2).transpose(1, 2)
        mine = ctx.group.scatter(parts.flatten(1, 2))  # (rows, most, heads, features)
        own = mine[:, : rows.counts[rows.rank]].transpose(1, 2)
        return own.to(gradient.dtype), None, None


def gather_keys(k: Tensor, v: Tensor, rows: CutRows, group: RankGroup) -> tuple[Tensor, Tensor]:
    """Gather keys and values, (rows, heads, own tokens, features) each, in one message."""
    if k.shape[:3] != v.shape[:3] or k.dtype != v.dtype:
        return gather_tokens(k, rows, group), gather_tokens(v, rows, group)
    both = gather_tokens(torch.cat((k, v), dim=-1), rows, group)
    whole_k, whole_v = both.split((k.shape[-1], v.shape[-1]), dim=-1)
    return whole_k, whole_v


# --- compute modules in which tokens meet otherwise than in attention, for rows cut over ranks


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
