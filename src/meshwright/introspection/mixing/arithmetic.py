"""Find out how a call of attention computes, by comparing its output with formulas."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from meshwright.core.errors import UnsupportedError

from .flex import PlaceMask
from .interception import AttentionCall
from .masks import causal, dense, everything
from .values import Arithmetic

BLOCKED = -1e4
"""Summands of scores below this block a key."""
LARGEST_ERROR = 1e-5
"""Relative, in fp64; calls that compute the softmax in fp32 reach about 1e-7."""


def arithmetic_of(calls: Sequence[AttentionCall]) -> Arithmetic | None:
    """Return the formula that gives the output of all these calls; None if no known one does."""
    first = calls[0].extras
    caps = ["", *(name for name, value in first.items() if isinstance(value, float))]
    sinks = ["", *(name for name, value in first.items() if isinstance(value, Tensor) and value.dim() == 1)]
    for cap, sink in itertools.product(caps, sinks):
        found = Arithmetic(cap, sink)
        if all(_is_computed_by(found, call) for call in calls):
            return found
    return None


def _is_computed_by(arithmetic: Arithmetic, call: AttentionCall) -> bool:
    if call.dropout or call.query.shape[1] % call.key.shape[1]:
        return False
    try:
        allowed, expected = allowed_of(call), call.as_given()
    except UnsupportedError:
        return False
    found = formula(arithmetic, call, allowed)
    seen = allowed.expand(*found.shape[:3], -1).any(-1, keepdim=True)
    error = torch.where(seen, found - expected, 0).norm()
    return bool(error <= LARGEST_ERROR * torch.where(seen, expected, 0).norm())


def formula(arithmetic: Arithmetic, call: AttentionCall, allowed: Tensor) -> Tensor:
    """Compute a call in plain torch: (rows, heads, queries, features)."""
    groups = call.query.shape[1] // call.key.shape[1]
    key, value = (x.repeat_interleave(groups, dim=1) for x in (call.key, call.value))
    scores = call.query @ key.transpose(-1, -2) * scale_of(call)
    if arithmetic.cap:
        cap = call.extras[arithmetic.cap]
        scores = cap * torch.tanh(scores / cap)
    scores = scores.masked_fill(~allowed, float("-inf"))
    if arithmetic.sinks:
        sink = call.extras[arithmetic.sinks].to(scores.dtype)[None, :, None, None].expand(*scores.shape[:3], 1)
        scores = torch.cat((scores, sink), dim=-1)
    return scores.softmax(-1).nan_to_num(0.0)[..., : key.shape[2]] @ value


def scale_of(call: AttentionCall) -> float:
    """Return the factor of a call's products."""
    return call.query.shape[-1] ** -0.5 if call.scale is None else call.scale


def raise_unless(holds: Tensor, error: Exception) -> None:
    """Raise an error unless a bool of no dims is true."""
    if not bool(holds):
        raise error


def allowed_of(
    call: AttentionCall,
    device: torch.device | None = None,
    expect: Callable[[Tensor, Exception], None] = raise_unless,
) -> Tensor:
    """Return which keys a call's queries attend to: (rows or 1, heads or 1, queries, keys) bool.

    Args:
        device: of what is made where the call has no tensor for a mask; None: its queries'.
        expect: raises an error, at once or later, unless what the mask holds is right.

    Raises:
        UnsupportedError: the mask adds other numbers to scores than 0 and those that block a key.
    """
    queries, keys = call.query.shape[2], call.key.shape[2]
    if isinstance(call.mask, PlaceMask):
        return call.mask.dense(len(call.query), call.query.shape[1], queries, keys, call.query.device)
    if not isinstance(call.mask, Tensor):
        rule = causal if call.is_causal else everything
        return dense(rule, torch.arange(queries, device=device or call.query.device)[None], keys, 1)
    mask = call.mask.reshape((1,) * (4 - call.mask.dim()) + call.mask.shape)
    if mask.dtype is torch.bool:
        return mask
    words = "a mask adds numbers to the scores of attention, by the distance of tokens or otherwise"
    expect(~((mask != 0) & (mask > BLOCKED)).any(), UnsupportedError(words))
    return mask == 0
