"""Find out how a call of attention computes, by comparing its output with formulas.

torch compiles the function at each eager call, and refuses a backward on a CPU. While a forward is intercepted here
torch's public stance keeps it from compiling, so that the call reaches torch's function mode; the handler computes it.
"""

from __future__ import annotations

import itertools
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from torch import Tensor

from meshwright.core.errors import UnsupportedError
from meshwright.core.torch_private import by_values, flex_operator, flex_score_is_plain, is_asked_by_flex

from .interception import AttentionCall, Handler, SdpaCalls
from .masks import MaskFunction, MaskRule, causal, dense, everything, rule_of

# --- intercept calls of ``torch.nn.attention.flex_attention``, whose masks are functions of places

MODULE = "torch.nn.attention.flex_attention"
CAP = "softcap"
"""Name of the soft cap among a call's other arguments."""
_HEADS = "the mask of flex_attention ({}) differs from head to head"
SCORES = (-300.0, -20.0, -3.0, -0.5, 0.0, 0.5, 3.0, 20.0, 300.0)
"""Scores at which a function of scores is compared with a soft cap."""


@dataclass(frozen=True, eq=False)
class PlaceMask:
    """A mask by places, as ``flex_attention`` takes it: ``mask_mod`` of its block mask."""

    function: MaskFunction

    @by_values
    def dense(self, rows: int, heads: int, queries: int, keys: int, device: torch.device) -> Tensor:
        """Evaluate the mask, one for all heads, as torch does, place by place: (rows, 1, queries, keys) bool."""
        from torch.nn.attention.flex_attention import create_mask

        made = create_mask(self.function, rows, heads, queries, keys, device=str(device))
        if not bool((made == made[:, :1]).all()):
            raise UnsupportedError(_HEADS.format(_name(self.function)))
        return made[:, :1]


class FlexCalls(SdpaCalls):
    """Hands calls of ``flex_attention`` to a handler, and those of ``F.scaled_dot_product_attention``."""

    def __enter__(self) -> Any:
        _stance.enter()
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        _stance.leave()

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if MODULE in sys.modules:
            if func is flex_operator():
                output = self.handler.attend(flex_call(*args, **(kwargs or {})))
                return output, output.new_empty(0), output.new_empty(0)  # neither logarithms nor largest scores
            if func == Tensor.requires_grad.__get__ and is_asked_by_flex(sys._getframe(1)):  # type: ignore[attr-defined]
                _stance.take()
                return False  # torch's own kernel has no backward on a CPU, and is not called
        if func is F.scaled_dot_product_attention:
            return super().__torch_function__(func, types, args, kwargs)
        return func(*args, **(kwargs or {}))


class _Stance:
    """Keeps torch from compiling while some thread intercepts; torch has one stance for all threads.

    Nothing is compiled before the compiler has been imported, which takes seconds: until then the stance is taken
    where ``flex_attention`` is called first.
    """

    def __init__(self) -> None:
        self._lock, self._inside = threading.RLock(), 0
        self._taken: Any = None

    def enter(self) -> None:
        with self._lock:
            self._inside += 1
            if "torch._dynamo" in sys.modules:
                self.take()

    def take(self) -> None:
        with self._lock:
            if self._taken is None:
                self._taken = torch.compiler.set_stance("force_eager")

    def leave(self) -> None:
        with self._lock:
            self._inside -= 1
            if self._inside == 0 and self._taken is not None:
                self._taken.__exit__(None, None, None)
                self._taken = None


_stance = _Stance()


@contextmanager
def computing_flex() -> Iterator[None]:
    """Compute ``flex_attention`` in plain torch inside, with a backward on any device."""
    with FlexCalls(Handler()):
        yield


def flex_call(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score_mod: Any,
    block_mask: tuple,
    scale: float,
    options: Mapping[str, Any],
    *_: Any,
    **__: Any,
) -> AttentionCall:
    """Describe a call of ``flex_attention`` by the arguments of its operator; refuse what is not computed."""
    if query.device.type == "cpu" and any(options.get(name) for name in ("OUTPUT_LOGSUMEXP", "OUTPUT_MAX")):
        # on other devices torch computes logarithms for its backward too; small copies are on the CPU
        raise UnsupportedError(
            "flex_attention is asked for more than its output (return_lse, return_aux), which is not computed"
        )
    cap = None if flex_score_is_plain(score_mod) else soft_cap_of(score_mod)

    def compute(query: Tensor, key: Tensor, value: Tensor, mask: Any, is_causal: bool = False) -> Tensor:
        if isinstance(mask, PlaceMask):
            mask = mask.dense(len(query), query.shape[1], query.shape[2], key.shape[2], query.device)
        groups = query.shape[1] // key.shape[1]
        if cap is None:
            return F.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scale, enable_gqa=groups > 1)
        key, value = (x.repeat_interleave(groups, dim=1) for x in (key, value))
        scores = cap * torch.tanh(query @ key.transpose(-1, -2) * scale / cap)
        return scores.masked_fill(~mask, float("-inf")).softmax(-1).nan_to_num(0.0) @ value

    extras = {} if cap is None else {CAP: cap}
    return AttentionCall(query, key, value, PlaceMask(block_mask[-1]), False, compute, scale=scale, extras=extras)


_caps: WeakKeyDictionary[Any, float | None] = WeakKeyDictionary()


def soft_cap_of(score_mod: Any) -> float | None:
    """Return the c of a score function that computes c · tanh(score / c), None if it changes none; refuse any other."""
    if score_mod not in _caps:
        scores = torch.tensor(SCORES, dtype=torch.float64)
        try:
            found = torch.stack([_at(score_mod, scores, *places) for places in ((0, 1, 5, 2), (1, 0, 3, 7))])
            cap = float(_at(score_mod, torch.tensor([1e30], dtype=torch.float64), 0, 1, 5, 2))
        except Exception:  # noqa: BLE001  (a user's function, called with other tensors than it expects)
            found, cap = torch.full((2, len(SCORES)), torch.nan, dtype=torch.float64), torch.nan
        if bool((found == scores).all()):
            _caps[score_mod] = None
        elif 0 < cap < 1e29 and torch.allclose(found, (cap * torch.tanh(scores / cap)).expand(2, -1), 1e-6, 0):
            _caps[score_mod] = cap
        else:
            raise UnsupportedError(
                f"flex_attention is called with score_mod = {_name(score_mod)}, which changes scores by another rule"
                f" than a soft cap"
            )
    return _caps[score_mod]


def _at(score_mod: Any, scores: Tensor, *places: int) -> Tensor:
    """Return what becomes of scores at one (row, head, query, key)."""
    return torch.stack([score_mod(score, *map(torch.tensor, places)) for score in scores])


def _name(function: Any) -> str:
    return getattr(function, "__qualname__", type(function).__name__)


def far_rules(call: AttentionCall) -> list[MaskRule]:
    """Return rules by which a call's mask may reach, from its values far from a row's first tokens."""
    function, last = call.mask.function, torch.tensor(call.query.shape[1] - 1)
    try:
        found, of_last = rule_of(function), rule_of(lambda row, head, query, key: function(row, last, query, key))
    except Exception:  # noqa: BLE001  (a user's function, which may hold a tensor of this row's tokens)
        return []
    if found != of_last:
        raise UnsupportedError(_HEADS.format(_name(function)))
    return [] if found is None else [found, replace(found, documents=True)]


# --- find out how a call of attention computes, by comparing its output with formulas


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


BLOCKED = -1e4
"""Summands of scores below this block a key."""
LARGEST_ERROR = 1e-5
"""Relative, in fp64; calls that compute the softmax in fp32 reach about 1e-7."""


def arithmetic_of(calls: Sequence[AttentionCall]) -> Arithmetic | None:
    """Return the formula that gives the output of all these calls; None if no known one does."""
    first = calls[0].extras
    caps = ["", *(name for name, value in first.items() if isinstance(value, float))]
    sinks = ["", *(name for name, value in first.items() if isinstance(value, Tensor) and value.dim() == 1)]

    def computes(arithmetic: Arithmetic, call: AttentionCall) -> bool:
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

    known = (Arithmetic(cap, sink) for cap, sink in itertools.product(caps, sinks))
    return next((found for found in known if all(computes(found, call) for call in calls)), None)


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
    call: AttentionCall, device: torch.device | None = None, expect: Callable[[Tensor, Exception], None] = raise_unless
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
