"""Mixtures of experts: one whose tokens have pairs of experts that are as good as each other, and others that have no
such.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from meshwright.models.decoder import Decoder
from meshwright.models.decoder_config import DecoderConfig, MoEConfig

VOCABULARY = 61
CONFIG = DecoderConfig(
    VOCABULARY,
    16,
    2,
    n_heads=4,
    n_kv_heads=2,
    hidden_dim=20,
    max_seq_len=20,
    moe=MoEConfig(n_experts=8, top_k=3, hidden_dim=12),
)


def clear_choices(config: DecoderConfig = CONFIG, kind: type[Decoder] = Decoder) -> Decoder:
    generator = torch.Generator().manual_seed(3)
    with torch.device("cpu"):
        model = kind(config)
        for parameter in model.parameters():
            drawn = torch.randn(parameter.shape, generator=generator)
            parameter.data = drawn / parameter.shape[-1] ** 0.5 if parameter.dim() > 1 else 1 + 0.1 * drawn
    return model


def saturated() -> Decoder:
    """Scores are zero, but for one expert of a token."""
    model = clear_choices()
    for block in model.layers.values():
        block.feed_forward.router.weight.data *= 300  # type: ignore[union-attr]
    return model


class Twice(Decoder):
    """Its blocks are run twice (arXiv 1909.11942)."""

    def forward(self, tokens: Tensor, *args: object, **kwargs: object) -> Tensor:
        first = super().forward(tokens, *args, **kwargs)  # type: ignore[arg-type]
        return first + super().forward(first.argmax(-1), *args, **kwargs)  # type: ignore[arg-type]


def called_twice() -> Decoder:
    return clear_choices(kind=Twice)


def capped_near_ties() -> Decoder:
    assert CONFIG.moe is not None
    return near_ties(replace(CONFIG, moe=replace(CONFIG.moe, capacity_factor=1.0)))


def near_ties(config: DecoderConfig = CONFIG) -> Decoder:
    """Every second expert is asked for like the one before it, but for less than what float32 keeps apart."""
    model = clear_choices(config)
    for block in model.layers.values():
        rows = block.feed_forward.router.weight.data  # type: ignore[union-attr]
        rows[1::2] = rows[::2] * (1 + 1e-7)
    return model
