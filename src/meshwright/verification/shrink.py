"""Shrink a model to one of the same structure that fits anywhere."""

from __future__ import annotations

import dataclasses

from meshwright.models.decoder_config import DecoderConfig

HEAD_DIM = 8
LAYERS = 2
VOCABULARY = 307


def shrunk(config: DecoderConfig) -> DecoderConfig:
    """Shrink a decoder to a small one of the same structure.

    The ratio of query to key heads, ties, norms, rotary scaling and the number of experts stay. Small values stay
    too: at most 2 key heads, heads of 8, 2 blocks (one of them dense if some are), 307 token ids.
    """
    group = config.n_heads // config.n_kv_heads
    n_kv_heads = min(config.n_kv_heads, 2)
    head_dim = min(config.head_dim, HEAD_DIM)
    dim = n_kv_heads * group * head_dim
    n_layers = min(config.n_layers, LAYERS)
    moe = config.moe
    if moe is not None:
        width = max(1, round(moe.hidden_dim * dim / config.dim)) if moe.hidden_dim else 0
        moe = dataclasses.replace(moe, hidden_dim=width, first_dense=min(moe.first_dense, n_layers - 1))
    return dataclasses.replace(
        config,
        vocab_size=min(config.vocab_size, VOCABULARY),
        dim=dim,
        n_layers=n_layers,
        n_heads=n_kv_heads * group,
        n_kv_heads=n_kv_heads,
        hidden_dim=max(1, round(config.hidden_dim * dim / config.dim)),
        moe=moe,
    )
