"""Generate text, token by token, with keys and values that belong to the generation."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from meshwright.core.dtypes import torch_dtype
from meshwright.core.errors import ConfigError
from meshwright.distributed.process import agree
from meshwright.distributed.step.part import Batch, Inputs
from meshwright.introspection.signature import Signature, logits_of
from meshwright.models.decoder import AttentionCore, Decoder
from meshwright.planning.plan import Plan

NextLogits = Callable[[Sequence[int]], Tensor]
"""All ids so far -> (vocabulary,) logits of the next one."""
Heard = Callable[[int], object]
"""Called with each new id; a true value ends the text behind it."""


@dataclass(frozen=True)
class Sampling:
    """The choice of an id by its logits.

    Attributes:
        temperature: 0 takes the likeliest id; above, samples softmax(logits / temperature) with ``seed``'s generator.
        top_k: sample among the k likeliest ids; 0: all.
        top_p: sample among the likeliest ids whose probabilities reach this sum (arXiv 1904.09751); 1: all.
    """

    temperature: float = 1.0
    seed: int = 0
    top_k: int = 0
    top_p: float = 1.0

    def __post_init__(self) -> None:
        if self.temperature < 0:
            raise ConfigError(f"sample.temperature = {self.temperature}: it must be 0 or more")
        if self.top_k < 0:
            raise ConfigError(f"top_k = {self.top_k}: it must be 0 (all ids) or more")
        if not 0 < self.top_p <= 1:
            raise ConfigError(f"top_p = {self.top_p}: it must be above 0, and at most 1 (all ids)")

    def choose(self, logits: Tensor, generator: torch.Generator) -> int:
        """Return the id that follows, by (vocabulary,) logits."""
        logits = logits.double().cpu()
        if self.temperature == 0:
            return int(logits.argmax())
        probabilities = torch.softmax(self._cut(logits / self.temperature), dim=-1)
        return int(torch.multinomial(probabilities, 1, generator=generator))

    def _cut(self, logits: Tensor) -> Tensor:
        if 0 < self.top_k < len(logits):
            logits = logits.masked_fill(logits < logits.topk(self.top_k).values[-1], -torch.inf)
        if self.top_p < 1:
            ordered, ids = logits.sort(descending=True)
            shares = torch.softmax(ordered, dim=-1)
            is_left_out = shares.cumsum(-1) - shares >= self.top_p
            logits = logits.masked_fill(torch.zeros_like(is_left_out).scatter(0, ids, is_left_out), -torch.inf)
        return logits


def generate(
    next_logits: NextLogits,
    prompt: Sequence[int],
    tokens: int,
    sampling: Sampling,
    *,
    stop: int | Collection[int] | None = None,
    heard: Heard | None = None,
) -> list[int]:
    """Generate the ids that follow ``prompt``, at most ``tokens`` of them.

    ``stop`` ids end the text, and are not returned; so does a true value of ``heard``, which is called with each id.
    """
    if not len(prompt):
        raise ConfigError("the prompt is empty: give at least one token to continue")
    if tokens < 0:
        raise ConfigError(f"tokens = {tokens}: it must be 0 or more")
    stops = {stop} if isinstance(stop, int) else set(stop or ())
    generator = torch.Generator().manual_seed(sampling.seed)
    ids = list(prompt)
    for _ in range(tokens):
        chosen = sampling.choose(next_logits(ids), generator)
        if chosen in stops:
            break
        ids.append(chosen)
        if heard is not None and heard(chosen):
            break
    return ids[len(prompt) :]


# --- compute the logits of the next id

log = logging.getLogger("meshwright")

PASTS = ("cache", "past_key_values")
"""Argument and output of transformers' models that hold keys and values: since 5.24, and before."""
BOUNDS = {torch.float64: 1e-9, torch.float32: 1e-4}
"""Largest difference between logits with and without a cache, relative to their norm; narrower dtypes: ``COARSE``."""
COARSE = 0.1


@dataclass
class Cacheless:
    """Why a model's text is computed without a cache: "" where there is one, proven; None where nobody knows yet."""

    reason: str | None = None


class DecoderCache:
    """Keys and values of the decoder's attention, which its cores are given by hooks for one generation."""

    def __init__(self, model: nn.Module, forward: Callable[[Batch], Tensor]):
        self._forward, self.seen, self.is_on = forward, 0, True
        self._kept: dict[nn.Module, tuple[Tensor, Tensor]] = {}
        cores = [module for module in model.modules() if isinstance(module, AttentionCore)]
        self._hooks = [core.register_forward_pre_hook(self._with_kept) for core in cores]

    def __call__(self, new: Tensor) -> Tensor:
        """Return the logits of (1, seq) ids that follow those of earlier calls."""
        places = torch.arange(self.seen, self.seen + new.shape[1]).unsqueeze(0)
        logits = self._forward({"tokens": new, "positions": places})
        self.seen += new.shape[1]
        return logits

    def close(self) -> None:
        """Take the hooks away, and drop what was kept."""
        for hook in self._hooks:
            hook.remove()
        self._kept.clear()

    def _with_kept(self, core: nn.Module, given: tuple[Any, ...]) -> tuple[Any, ...]:
        """Put kept keys and values before the new ones: (rows, heads, seq, head)."""
        if not self.is_on:
            return given
        q, k, v, _ = given
        end = self.seen + k.shape[2]
        keys, values = self._kept.get(core, (k, v))
        if core not in self._kept or end > keys.shape[2]:  # room for twice as many, so that few steps copy all of them
            old = keys, values
            keys, values = (each.new_empty(*each.shape[:2], 2 * end, each.shape[3]) for each in old)
            for new, each in zip((keys, values), old, strict=True):
                new[:, :, : self.seen] = each[:, :, : self.seen]
            self._kept[core] = keys, values
        keys[:, :, self.seen : end], values[:, :, self.seen : end] = k, v
        seen = torch.ones(q.shape[2], end, dtype=torch.bool, device=q.device).tril(self.seen) if self.seen else None
        return q, keys[:, :, :end], values[:, :, :end], seen


class OwnCache:
    """Keys and values in the model's own object, an argument and output of that ``name``, one of ``PASTS``."""

    def __init__(self, forward: Callable[..., Any], inputs: Inputs, name: str):
        self._forward, self._inputs, self._name, self.seen, self.is_on = forward, inputs, name, 0, True
        self._past: Any = None

    def __call__(self, new: Tensor) -> Tensor:
        """Return the logits of (1, seq) ids that follow those of earlier calls."""
        past = {} if self._past is None else {self._name: self._past}
        output = self._forward(**{**self._inputs({"tokens": new}), "use_cache": True, **past})
        self._past, self.seen = getattr(output, self._name, None), self.seen + new.shape[1]
        self.is_on = self._past is not None
        return logits_of(output)

    def close(self) -> None:
        """Drop what was kept."""
        self._past = None


class Cached:
    """Logits of the next id, by a forward of the ids that are new since the last call.

    Once, behind the second id of a model's first text, they are compared with those of the whole window; beyond
    rounding, whole windows are computed from there on. So they are behind the model's window, where each step drops an
    older id and moves all positions.

    Args:
        whole: the logits of the next id by a forward of the whole window.
        window: longest sequence that the model takes.
    """

    def __init__(
        self, cache: DecoderCache | OwnCache, whole: NextLogits, window: int | None, bound: float, judged: Cacheless
    ):
        self.cache, self._whole, self._window, self._bound, self._judged = cache, whole, window, bound, judged
        self._is_used = True

    def __call__(self, ids: Sequence[int]) -> Tensor:
        if not self._is_used or (self._window is not None and len(ids) > self._window):
            self._is_used = False
            self.cache.close()
            return self._whole(ids)
        begins = self.cache.seen == 0
        logits = self.cache(torch.tensor([ids[self.cache.seen :]]))[0, -1]
        if not self.cache.is_on:
            self._is_used, self._judged.reason = False, "its forward returns no keys and values"
        if begins or self._judged.reason is not None:
            return logits
        self.cache.is_on = False
        whole = self._whole(ids)
        self.cache.is_on = True
        error = float((logits - whole).double().norm() / whole.double().norm().clamp_min(1e-12))
        self._is_used = not agree.any_rank(not error <= self._bound)
        reason = "" if self._is_used else f"with kept keys and values its logits differ by {error:.1e} of their norm"
        if reason:
            log.warning("%s; a text is computed from its whole window for each id", reason)
        self._judged.reason = reason
        return logits if self._is_used else whole


@contextmanager
def next_logits(
    model: nn.Module,
    plan: Plan,
    signature: Signature,
    inputs: Inputs,
    logits: Callable[[Batch], Tensor],
    window: int | None,
    judged: Cacheless,
) -> Iterator[NextLogits]:
    """Give a function for the logits of the next id, with a cache where the model and its layout have an exact one.

    Args:
        logits: a batch -> (rows, seq, vocabulary), on any layout.
        window: longest sequence that the model takes; older ids are dropped. None: no bound.
        judged: takes the answer whether there is one, as soon as it is known, for the next generations.
    """

    def whole(ids: Sequence[int]) -> Tensor:
        return logits({"tokens": torch.tensor([ids[-window:] if window else ids])})[0, -1]

    if judged.reason is None:
        judged.reason = why_none(model, plan, signature) or None
    if judged.reason:
        yield whole
        return
    if isinstance(model, Decoder):
        cache: DecoderCache | OwnCache = DecoderCache(model, logits)
    else:
        cache = OwnCache(model, inputs, next(name for name in PASTS if name in signature.arguments))
    bound = BOUNDS.get(torch_dtype(plan.precision.compute), COARSE)
    try:
        yield Cached(cache, whole, window, bound, judged)
    finally:
        cache.close()


def why_none(model: nn.Module, plan: Plan, signature: Signature) -> str:
    """Return why a generation recomputes the whole window for each id; "" where it keeps keys and values."""
    if plan.pipeline is not None:
        return "layout.pp: a stage's keys and values are not kept"
    if plan.context is not None:
        return "layout.cp: attention is computed on whole rows"
    if plan.compiled:
        return "techniques.compile: each length of kept keys would compile anew"
    if plan.float8 is not None:
        return "techniques.float8: a product's scale follows from all ids at once"
    moe = model.config.moe if isinstance(model, Decoder) else None
    if moe is not None and moe.capacity_factor:
        return "model.moe.capacity_factor: an expert's capacity follows from all ids at once"
    if isinstance(model, Decoder) or any({name, "use_cache"} <= set(signature.arguments) for name in PASTS):
        return ""
    return f"{type(model).__name__}.forward takes no keys and values ({' or '.join(PASTS)})"
