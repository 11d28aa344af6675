"""Attend to the tokens of whole rows, of which each rank has a part."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor

from meshwright.distributed.exchange.ranks import RankGroup
from meshwright.introspection.mixing.arithmetic import scale_of
from meshwright.introspection.mixing.interception import AttentionCall
from meshwright.introspection.mixing.reach import KeyRanges, RowMask
from meshwright.introspection.mixing.values import Arithmetic
from meshwright.planning.context.methods import Method, is_divisible

from .kernels.blocks import Scores, block_attention
from .kernels.fused import wide
from .methods.arriving import Exchange, Gathered, Reached, arriving_attention
from .methods.halo import Halo
from .methods.heads import Members, shares_of_heads, to_heads, to_tokens
from .methods.ring import Ring, ring_attention
from .reaches import on_device
from .rows import CutRows, kept_on, select

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
