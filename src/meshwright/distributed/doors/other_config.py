"""Convert KempnerForge's ModelConfig to a config of meshwright's decoder."""

from __future__ import annotations

from typing import Any

from meshwright.core.errors import ConfigError, UnsupportedError
from meshwright.models.decoder_config import DecoderConfig

SAME = ("vocab_size", "dim", "n_layers", "n_heads", "n_kv_heads", "max_seq_len", "norm_eps", "rope_theta", "qk_norm")
ONE_VALUE = {
    "norm_type": "rmsnorm",
    "activation": "silu",
    "init_std": 0.02,
    "num_experts": 0,
    "vision_config": None,
    "vlm_config": None,
}
"""Fields for which meshwright's decoder supports only one value."""
INSTEAD = {
    "num_experts": "write a DecoderConfig with moe=MoEConfig(n_experts=..., top_k=...)",
    "vision_config": "lay your own model with a vision tower out by apply_fsdp2",
    "vlm_config": "lay your own model with a vision tower out by apply_fsdp2",
}


def decoder_config(config: Any) -> Any:
    """Convert KempnerForge's config (with ``ffn_hidden_dim``, ``tie_embeddings``) to a DecoderConfig; return others.

    Raises:
        UnsupportedError: a field requests a feature that the decoder lacks; the text names it and the legal value.
        ConfigError: the width of the feed-forward is not given.
    """
    if isinstance(config, DecoderConfig) or not all(
        hasattr(config, name) for name in ("ffn_hidden_dim", "tie_embeddings", "dim")
    ):
        return config
    for name, only in ONE_VALUE.items():
        if (found := getattr(config, name, only)) != only:
            hint = INSTEAD.get(name, "lay your own nn.Module out")
            has = f"has {name} = {only} alone" if only is not None else "has no vision tower"
            raise UnsupportedError(
                f"{type(config).__name__}.{name} is {found}: meshwright's decoder {has}. Use that, or {hint}."
            )
    width = config.ffn_hidden_dim or getattr(config, "computed_ffn_hidden_dim", None)
    if width is None:
        raise ConfigError(
            f"{type(config).__name__}.ffn_hidden_dim = None: give it a number; it is hidden_dim of a DecoderConfig"
        )
    same = {name: value for name in SAME if (value := getattr(config, name, None)) is not None}
    same.setdefault("n_kv_heads", config.n_heads)
    return DecoderConfig(**same, hidden_dim=width, tied_embeddings=config.tie_embeddings)
