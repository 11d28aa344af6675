"""Define the decoder's shapes and named sizes, without torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from meshwright.core.config.ranges import ABOVE_0, FROM_0, FROM_1, NOT_EMPTY, check_ranges


@dataclass(frozen=True)
class RopeScaling:
    """Rotary frequency scaling for longer sequences, as in Llama 3.1 (arXiv 2407.21783); off until a key is set."""

    factor: Annotated[float, ABOVE_0] = 8.0
    """Divisor of the low frequencies."""
    low_freq_factor: Annotated[float, ABOVE_0] = 1.0
    """Frequencies with fewer turns than this number over original_max_seq_len are divided in full."""
    high_freq_factor: Annotated[float, ABOVE_0] = 4.0
    """Frequencies with more turns than this number over original_max_seq_len stay as they are."""
    original_max_seq_len: Annotated[int, FROM_1] = 8192
    """Sequence length, in tokens, that the unscaled frequencies were made for."""


ROUTERS = ("softmax", "sigmoid")


@dataclass(frozen=True)
class MoEConfig:
    """A mixture of experts for the feed-forwards; off until one of its keys is set."""

    n_experts: Annotated[int, FROM_1] = 8
    """Number of experts in each layer."""
    top_k: Annotated[int, FROM_1] = 2
    """Number of experts that each token goes to."""
    hidden_dim: Annotated[int, FROM_0] = 0
    """Hidden width of an expert; 0: model.hidden_dim."""
    n_shared: Annotated[int, FROM_0] = 0
    """Number of shared experts, which every token goes to besides."""
    first_dense: Annotated[int, FROM_0] = 0
    """Number of first layers that have a feed-forward without experts."""
    router: Annotated[str, NOT_EMPTY] = "softmax"
    """Function that scores experts: softmax (arXiv 2401.04088), or sigmoid (arXiv 2412.19437)."""
    n_groups: Annotated[int, FROM_1] = 1
    """Number of groups of experts; a token's experts come from its best groups."""
    top_groups: Annotated[int, FROM_1] = 1
    """Number of best groups that a token's experts come from."""
    normalise: bool = True
    """Scale the weights of a token's experts to sum to one."""
    scale: Annotated[float, ABOVE_0] = 1.0
    """Factor on the weights of the experts."""
    bias_rate: Annotated[float, FROM_0] = 0.0
    """Step of the bias that balances experts without a loss, moved once per optimizer step; 0: none."""
    sequence_loss: Annotated[float, FROM_0] = 0.0
    """Weight of the loss that balances experts within each sequence; 0: none."""
    batch_loss: Annotated[float, FROM_0] = 0.0
    """Weight of the loss that balances experts within a microbatch of all ranks; 0: none."""
    z_loss: Annotated[float, FROM_0] = 0.0
    """Weight of the loss on the size of the router's logits; 0: none."""
    capacity_factor: Annotated[float, FROM_0] = 0.0
    """An expert's capacity per sequence, in even shares; tokens beyond skip the expert; 0: no token is dropped."""

    def check(self) -> None:
        """Raise ValueError for sizes that do not fit together; the message names them."""
        check_ranges(self, "model.moe")
        if self.router not in ROUTERS:
            raise ValueError(f"model.moe.router = {self.router!r}: legal are {' and '.join(ROUTERS)}")
        if self.n_experts % self.n_groups:
            raise ValueError(
                f"model.moe.n_groups = {self.n_groups} does not divide model.moe.n_experts = {self.n_experts}"
            )
        if self.top_groups > self.n_groups:
            raise ValueError(
                f"model.moe.top_groups = {self.top_groups} is more than model.moe.n_groups = {self.n_groups}"
            )
        reached = self.n_experts // self.n_groups * self.top_groups
        if self.top_k > reached:
            where = "" if self.n_groups == 1 else f" of {self.top_groups} of {self.n_groups} groups"
            raise ValueError(
                f"model.moe.top_k = {self.top_k} is more than the {reached} experts{where} that a token can choose from"
            )


OTHER_NAMES = {
    "tie_embeddings": "tied_embeddings",
    "tie_word_embeddings": "tied_embeddings",
    "ffn_hidden_dim": "hidden_dim",
    "hidden_size": "dim",
    "intermediate_size": "hidden_dim",
    "num_hidden_layers": "n_layers",
    "num_attention_heads": "n_heads",
    "num_key_value_heads": "n_kv_heads",
    "max_position_embeddings": "max_seq_len",
    "rms_norm_eps": "norm_eps",
    "num_experts": "moe=MoEConfig(n_experts=...)",
}
"""Other systems' names for fields of ``DecoderConfig``, and the fields."""


@dataclass(frozen=True)
class DecoderConfig:
    """The shape of a decoder-only transformer.

    Raises:
        ValueError: sizes that do not fit together, or a field by another system's name; the message names them.
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
    moe: MoEConfig | None = None

    def __new__(cls, *args: object, **fields: object) -> DecoderConfig:
        """Refuses fields by other systems' names, with ours."""
        if other := [name for name in fields if name in OTHER_NAMES]:
            raise ValueError(
                f"DecoderConfig has no field {', '.join(other)}: write {', '.join(OTHER_NAMES[name] for name in other)}"
            )
        return super().__new__(cls)

    def __post_init__(self) -> None:
        for name in ("vocab_size", "dim", "n_layers", "n_heads", "n_kv_heads", "hidden_dim", "max_seq_len"):
            if getattr(self, name) < 1:
                raise ValueError(f"model.{name} = {getattr(self, name)}: it must be at least 1")
        if self.dim % self.n_heads:
            raise ValueError(f"model.dim = {self.dim} is not a multiple of model.n_heads = {self.n_heads}")
        if self.head_dim % 2:
            raise ValueError(f"model.dim / model.n_heads = {self.head_dim}: rotary embeddings need an even head size")
        if self.n_heads % self.n_kv_heads:
            raise ValueError(
                f"model.n_heads = {self.n_heads} is not a multiple of model.n_kv_heads = {self.n_kv_heads}"
            )
        if self.moe is not None:
            self.moe.check()
        if self.moe is not None and self.moe.first_dense >= self.n_layers:
            raise ValueError(
                f"model.moe.first_dense = {self.moe.first_dense} leaves no layer of {self.n_layers} for experts"
            )

    @property
    def head_dim(self) -> int:
        return self.dim // self.n_heads

    @property
    def expert_dim(self) -> int:
        """The hidden width of an expert."""
        return (self.moe.hidden_dim if self.moe is not None else 0) or self.hidden_dim


SIZES: dict[str, DecoderConfig] = {
    "debug": DecoderConfig(256, 64, 2, 4, 2, 160, 256, qk_norm=True),
    "demo": DecoderConfig(257, 128, 2, 4, 4, 384, 1024),
    # MobileLLM-125M (arXiv 2402.14905)
    "125M": DecoderConfig(32_000, 576, 30, 9, 3, 1536, 2048, tied_embeddings=True),
    # Llama 3.2 1B
    "1B": DecoderConfig(
        128_256,
        2048,
        16,
        32,
        8,
        8192,
        131_072,
        rope_theta=500_000.0,
        rope_scaling=RopeScaling(factor=32.0),
        tied_embeddings=True,
    ),
    # Llama 3 8B and 70B (arXiv 2407.21783)
    "8B": DecoderConfig(128_256, 4096, 32, 32, 8, 14_336, 8192, rope_theta=500_000.0),
    "70B": DecoderConfig(128_256, 8192, 80, 64, 8, 28_672, 8192, rope_theta=500_000.0),
}
"""Named sizes: "demo" trains in seconds on a laptop; "debug" is for tests; others have published parameter counts."""


def parameter_count(config: DecoderConfig) -> int:
    """Count the distinct parameters (tied ones once) from the shapes alone."""
    c = config
    attention = c.dim * c.head_dim * (2 * c.n_heads + 2 * c.n_kv_heads) + (2 * c.head_dim if c.qk_norm else 0)
    sparse = 0 if c.moe is None else c.n_layers - c.moe.first_dense
    expert = 3 * c.dim * c.expert_dim
    mixture = 0 if c.moe is None else (c.moe.n_experts + c.moe.n_shared) * expert + c.moe.n_experts * c.dim
    embeddings = c.vocab_size * c.dim * (1 if c.tied_embeddings else 2)
    feed_forwards = (c.n_layers - sparse) * 3 * c.dim * c.hidden_dim + sparse * mixture
    return embeddings + c.n_layers * (attention + 2 * c.dim) + feed_forwards + c.dim


def idle_parameters(config: DecoderConfig) -> int:
    """Count the parameters of the experts that a token does not go to."""
    c = config
    return (
        0
        if c.moe is None
        else (c.n_layers - c.moe.first_dense) * (c.moe.n_experts - c.moe.top_k) * 3 * c.dim * c.expert_dim
    )
