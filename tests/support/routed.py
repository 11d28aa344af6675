"""Mixtures of experts: one whose tokens have pairs of experts that are as good as each other, and one that has no such."""

from __future__ import annotations

import torch

from meshwright.models.decoder import Decoder
from meshwright.models.decoder_config import DecoderConfig, MoEConfig

VOCABULARY = 61
CONFIG = DecoderConfig(
    VOCABULARY, 16, 2, n_heads=4, n_kv_heads=2, hidden_dim=20, max_seq_len=20, moe=MoEConfig(n_experts=8, top_k=3, hidden_dim=12)
)


def clear_choices() -> Decoder:
    generator = torch.Generator().manual_seed(3)
    with torch.device("cpu"):
        model = Decoder(CONFIG)
        for parameter in model.parameters():
            drawn = torch.randn(parameter.shape, generator=generator)
            parameter.data = drawn / parameter.shape[-1] ** 0.5 if parameter.dim() > 1 else 1 + 0.1 * drawn
    return model


def near_ties() -> Decoder:
    """Every second expert is asked for like the one before it, but for less than what float32 keeps apart."""
    model = clear_choices()
    for block in model.layers.values():
        rows = block.feed_forward.router.weight.data  # type: ignore[union-attr]
        rows[1::2] = rows[::2] * (1 + 1e-7)
    return model
