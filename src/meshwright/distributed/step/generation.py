"""Sample from a model, token by token, by running the whole window each time (right for short samples)."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from meshwright.core.errors import ConfigError


def generate(
    next_logits: Callable[[Tensor], Tensor],
    prompt: Sequence[int],
    tokens: int,
    window: int | None,
    *,
    temperature: float = 1.0,
    seed: int = 0,
    stop: int | None = None,
) -> list[int]:
    """Generate the ids that follow ``prompt``, at most ``tokens`` of them.

    Args:
        next_logits: (1, seq) ids -> (vocab,) logits of the next one.
        window: longest sequence that the model takes; older ids are dropped.
        temperature: 0 takes the likeliest id; above, samples softmax(logits / temperature) with ``seed``'s generator.
        stop: an id that ends the text (it is not returned).

    Raises:
        ConfigError: an empty prompt, or a negative temperature.
    """
    if not len(prompt):
        raise ConfigError("the prompt is empty: give at least one token to continue")
    if temperature < 0:
        raise ConfigError(f"sample.temperature = {temperature}: it must be 0 or more")
    generator = torch.Generator().manual_seed(seed)
    ids = list(prompt)
    for _ in range(tokens):
        logits = next_logits(torch.tensor([ids[-window:] if window else ids])).double().cpu()
        if temperature == 0:
            chosen = int(logits.argmax())
        else:
            chosen = int(torch.multinomial(torch.softmax(logits / temperature, dim=-1), 1, generator=generator))
        if chosen == stop:
            break
        ids.append(chosen)
    return ids[len(prompt) :]
