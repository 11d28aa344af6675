"""Attend to the tokens of whole rows, of which each rank has a part."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from meshwright.distributed.exchange.ranks import RankGroup
from meshwright.introspection.mixing.arithmetic import scale_of
from meshwright.introspection.mixing.interception import AttentionCall
from meshwright.introspection.mixing.reach import KeyRanges, RowMask
from meshwright.introspection.mixing.values import Arithmetic
from meshwright.planning.context.methods import Method, is_divisible

from .blocks import Scores, block_attention, wide
from .halo import Halo, fetch
from .heads import Members, shares_of_heads, to_heads, to_tokens
from .ring import Ring, ring_attention
from .rows import FILLER, CutRows, select


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
        return self.reach.take(self.rows.own)


def attend(call: AttentionCall, context: Context, arithmetic: Arithmetic, method: Method) -> Tensor:
    """Compute a call whose keys lie on all ranks: (rows, heads, own queries, features)."""
    cap = call.extras[arithmetic.cap] if arithmetic.cap else None
    scores = Scores(scale_of(call), cap, bool(arithmetic.sinks))
    neighbours = method.neighbours
    if not is_divisible(call.query.shape[1], call.key.shape[1], neighbours):
        neighbours = 1  # a small copy has fewer heads than its model
    if _is_less_by_halo(call, context, method):
        found = _fetched(call, context, _halo(call, context), scores)
    elif method.kind == "all_gather":
        key, value = gather_keys(call.key, call.value, context.rows, context.group)
        found = block_attention(call.query, key, value, context.own_reach, scores)
    elif method.kind == "halo":
        found = _fetched(call, context, _halo(call, context), scores)
    elif neighbours == 1:
        found = _passed(call, context, scores)
    else:
        return _traded(call, context, scores, arithmetic, neighbours)
    output, logarithm = found
    return _finished(call, arithmetic, output, logarithm, range(call.query.shape[1]))


def attend_to_whole_rows(call: AttentionCall, mask: RowMask, rows: CutRows, group: RankGroup) -> Tensor:
    """Compute a call as the model does, with keys and values of whole rows, and a mask of all queries and keys."""
    key, value = gather_keys(call.key, call.value, rows, group)
    return call.compute(call.query, key, value, mask.dense(rows.own, rows.length, len(call.query)), False)


def _finished(call: AttentionCall, arithmetic: Arithmetic, output: Tensor, logarithm: Tensor, heads: range) -> Tensor:
    """Give sinks their share, one more score for each of these heads, and return the dtype of queries."""
    if arithmetic.sinks:
        sink = call.extras[arithmetic.sinks][heads.start : heads.stop].to(logarithm.dtype)
        output = output * torch.sigmoid(logarithm - sink[None, :, None])[..., None]
    return output.to(call.query.dtype)


def _halo(call: AttentionCall, context: Context) -> Halo:
    memo = context.rows.memo
    if (context.reach, "halo") not in memo:
        memo[context.reach, "halo"] = Halo.of(context.group, context.rows, context.reach, len(call.query))
    return memo[context.reach, "halo"]


def _is_less_by_halo(call: AttentionCall, context: Context, method: Method) -> bool:
    """Tell whether rows of several documents move fewer bytes by a halo, on the rank that sends most."""
    rows = context.rows
    if method.asked or method.kind == "halo" or not rows.has_documents:
        return False
    size = call.key.element_size() + wide(call.key[:0]).element_size()
    each = call.key.shape[1] * (call.key.shape[3] + call.value.shape[3]) * size
    return _halo(call, context).most * each < len(call.query) * max(rows.counts) * method.bytes


def _fetched(call: AttentionCall, context: Context, halo: Halo, scores: Scores) -> tuple[Tensor, Tensor]:
    key, value = call.key, call.value
    if key.shape[:3] == value.shape[:3] and key.dtype == value.dtype:
        both = fetch(torch.cat((key, value), dim=-1), halo)
        key, value = both.split((key.shape[-1], value.shape[-1]), dim=-1)
    else:
        key, value = fetch(key, halo), fetch(value, halo)
    reach = context.own_reach.among(halo.places)
    return block_attention(call.query, key, value, reach, scores)


def _passed(call: AttentionCall, context: Context, scores: Scores) -> tuple[Tensor, Tensor]:
    rows = context.rows
    places = tuple(rows.places_of(rank) for rank in range(context.group.size))
    ring = Ring(context.group, rows.rank, places)
    return ring_attention(call.query, call.key, call.value, ring, context.own_reach, scores)


def _traded(call: AttentionCall, context: Context, scores: Scores, arithmetic: Arithmetic, neighbours: int) -> Tensor:
    """Trade tokens for heads among neighbours, let keys and values go round the rest, and trade back."""
    group, rows = context.group, context.rows
    everyone = [Members.of(group, rows, first, neighbours) for first in range(0, group.size, neighbours)]
    position = group.rank // neighbours
    members = everyone[position]
    heads, key_heads = shares_of_heads(call.query.shape[1], call.key.shape[1], neighbours)
    query = to_heads(call.query, heads, members)
    if call.key.shape[:3] == call.value.shape[:3] and call.key.dtype == call.value.dtype:
        both = to_heads(torch.cat((call.key, call.value), dim=-1), key_heads, members)
        key, value = both.split((call.key.shape[-1], call.value.shape[-1]), dim=-1)
    else:
        key, value = to_heads(call.key, key_heads, members), to_heads(call.value, key_heads, members)
    reach = context.reach.take(members.places)
    if len(everyone) == 1:
        found = block_attention(query, key, value, reach, scores)
    else:
        ring = Ring(group, position, tuple(each.places for each in everyone), neighbours)
        found = ring_attention(query, key, value, ring, reach, scores)
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
        parts = [select(wide, places.clamp(min=0), 2).transpose(1, 2) for places in rows.places]
        for part, places in zip(parts, rows.places, strict=True):
            part.masked_fill_((places == FILLER)[:, :, None, None], 0)
        mine = ctx.group.scatter(torch.cat(parts, dim=1).contiguous())  # (rows, most, heads, features)
        own = mine[:, : rows.counts[rows.rank]].transpose(1, 2)
        return own.to(gradient.dtype), None, None


def gather_keys(k: Tensor, v: Tensor, rows: CutRows, group: RankGroup) -> tuple[Tensor, Tensor]:
    """Gather keys and values, (rows, heads, own tokens, features) each, in one message."""
    if k.shape[:3] != v.shape[:3] or k.dtype != v.dtype:
        return gather_tokens(k, rows, group), gather_tokens(v, rows, group)
    both = gather_tokens(torch.cat((k, v), dim=-1), rows, group)
    whole_k, whole_v = both.split((k.shape[-1], v.shape[-1]), dim=-1)
    return whole_k, whole_v
