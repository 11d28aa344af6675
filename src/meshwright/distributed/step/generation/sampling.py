"""Sample from a model, token by token."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from meshwright.core.errors import ConfigError

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

    Args:
        stop: ids that end the text (they are not returned).
        heard: called with each id as soon as it is chosen; a true value ends the text.

    Raises:
        ConfigError: an empty prompt, or a negative number of tokens.
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
