"""Shapes of the decoder, and its named sizes. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class RopeScaling:
    """Scaling of the rotary frequencies for longer sequences, as in Llama 3.1 (arXiv 2407.21783); off until one of its keys is set."""

    factor: float = 8.0
    """Low frequencies are divided by this."""
    low_freq_factor: float = 1.0
    """Frequencies with fewer turns than this over original_max_seq_len are divided in full."""
    high_freq_factor: float = 4.0
    """Frequencies with more turns than this over original_max_seq_len stay as they are."""
    original_max_seq_len: int = 8192
    """Sequence length, in tokens, that the unscaled frequencies were made for."""


@dataclass(frozen=True)
class DecoderConfig:
    """Shape of a decoder-only transformer.

    Raises:
        ValueError: sizes that do not fit together; the text names them.
    """

    vocab_size: int
    dim: int
    n_layers: int
    n_heads: int
    n_kv_heads: int
    hidden_dim: int
    max_seq_len: int
    norm_eps: float = 1e-5
    rope_theta: float = 10_000.0
    rope_scaling: RopeScaling | None = None
    qk_norm: bool = False
    tied_embeddings: bool = False

    def __post_init__(self) -> None:
        for name in ("vocab_size", "dim", "n_layers", "n_heads", "n_kv_heads", "hidden_dim", "max_seq_len"):
            if getattr(self, name) < 1:
                raise ValueError(f"model.{name} = {getattr(self, name)}: it must be at least 1")
        if self.dim % self.n_heads:
            raise ValueError(f"model.dim = {self.dim} is not a multiple of model.n_heads = {self.n_heads}")
        if self.head_dim % 2:
            raise ValueError(f"model.dim / model.n_heads = {self.head_dim}: rotary embeddings need an even head size")
        if self.n_heads % self.n_kv_heads:
            raise ValueError(f"model.n_heads = {self.n_heads} is not a multiple of model.n_kv_heads = {self.n_kv_heads}")

    @property
    def head_dim(self) -> int:
        return self.dim // self.n_heads


SIZES: dict[str, DecoderConfig] = {
    "debug": DecoderConfig(256, 64, 2, 4, 2, 160, 256, qk_norm=True),
    "demo": DecoderConfig(257, 128, 2, 4, 4, 384, 1024),
    # MobileLLM-125M (arXiv 2402.14905)
    "125M": DecoderConfig(32_000, 576, 30, 9, 3, 1536, 2048, tied_embeddings=True),
    # Llama 3.2 1B
    "1B": DecoderConfig(
        128_256, 2048, 16, 32, 8, 8192, 131_072, rope_theta=500_000.0, rope_scaling=RopeScaling(factor=32.0), tied_embeddings=True
    ),
    # Llama 3 8B and 70B (arXiv 2407.21783)
    "8B": DecoderConfig(128_256, 4096, 32, 32, 8, 14_336, 8192, rope_theta=500_000.0),
    "70B": DecoderConfig(128_256, 8192, 80, 64, 8, 28_672, 8192, rope_theta=500_000.0),
}
"""Named sizes. "demo" trains in seconds on a laptop; "debug" is for tests; the others have published parameter counts."""


def parameter_count(config: DecoderConfig) -> int:
    """Number of distinct parameters (tied ones once), from the shapes alone."""
    c = config
    attention = c.dim * c.head_dim * (2 * c.n_heads + 2 * c.n_kv_heads) + (2 * c.head_dim if c.qk_norm else 0)
    block = attention + 3 * c.dim * c.hidden_dim + 2 * c.dim
    embeddings = c.vocab_size * c.dim * (1 if c.tied_embeddings else 2)
    return embeddings + c.n_layers * block + c.dim
