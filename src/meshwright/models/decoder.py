"""Define a decoder-only transformer in plain torch.

Its parts: RMSNorm, RoPE, grouped-query attention, SwiGLU or a mixture of such experts. Shapes in comments: ``rows``
sequences of ``seq`` tokens, ``dim`` features, ``heads`` of ``head`` features. "In at least fp32" means: fp32 for
narrower dtypes, and fp64 stays fp64.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from meshwright.core.torch_private import fuses_masked_groups
from meshwright.models.layers import FeedForward, MixtureOfExperts, RMSNorm, at_least_fp32

from .decoder_config import DecoderConfig


def rotary_frequencies(config: DecoderConfig, device: torch.device, dtype: torch.dtype) -> Tensor:
    """Compute each feature pair's angular frequency, (head / 2,), with Llama-3's scaling where the config has it."""
    exponent = torch.arange(0, config.head_dim, 2, device=device, dtype=dtype) / config.head_dim
    frequency = config.rope_theta**-exponent
    scaling = config.rope_scaling
    if scaling is None:
        return frequency
    turns = scaling.original_max_seq_len * frequency / (2 * math.pi)  # full turns within the original length
    smooth = ((turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)).clamp(0, 1)
    return frequency * (smooth + (1 - smooth) / scaling.factor)


def rotary_tables(config: DecoderConfig, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Compute cos and sin of all angles, each (rows, 1, seq, head), in ``dtype``; the angles in at least fp32."""
    wide = at_least_fp32(dtype)
    angles = positions.to(wide).unsqueeze(-1) * rotary_frequencies(config, positions.device, wide)
    angles = torch.cat((angles, angles), dim=-1).unsqueeze(1)
    return angles.cos().to(dtype), angles.sin().to(dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the pairs (i, i + head/2) of x, (rows, heads, seq, head), by position (RoPE, arXiv 2104.09864)."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


class AttentionCore(nn.Module):
    """softmax(q kᵀ) v with a causal mask, or a given one; a module of its own so that it can be replaced."""

    mask_rule = "causal per document"
    """What a given mask allows, in rows of any length."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        """Attend from each query to the keys that the mask allows.

        Args:
            q: (rows, heads, seq, head).
            k, v: (rows, kv_heads, seq, head).
            mask: (rows, 1, seq, seq), added to scores, or True where a token may attend; None: causal.
        """
        grouped = q.shape[1] != k.shape[1]
        if grouped and mask is not None and not fuses_masked_groups(q.device):
            k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
            grouped = False
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None, enable_gqa=grouped)


class Attention(nn.Module):
    """Grouped-query attention (arXiv 2305.13245), with RMSNorm on each head's q and k where the config has it."""

    def __init__(self, config: DecoderConfig):
        super().__init__()
        self.head_dim = config.head_dim
        self.wq = nn.Linear(config.dim, config.n_heads * config.head_dim, bias=False)
        self.wk = nn.Linear(config.dim, config.n_kv_heads * config.head_dim, bias=False)
        self.wv = nn.Linear(config.dim, config.n_kv_heads * config.head_dim, bias=False)
        self.wo = nn.Linear(config.n_heads * config.head_dim, config.dim, bias=False)
        self.q_norm = RMSNorm(config.head_dim, config.norm_eps) if config.qk_norm else None
        self.k_norm = RMSNorm(config.head_dim, config.norm_eps) if config.qk_norm else None
        self.core = AttentionCore()

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor | None) -> Tensor:
        q, k, v = (w(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for w in (self.wq, self.wk, self.wv))
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        out = self.core(rotate(q, cos, sin), rotate(k, cos, sin), v, mask)  # (rows, heads, seq, head)
        return self.wo(out.transpose(1, 2).flatten(-2))


class Block(nn.Module):
    """Pre-norm attention and feed-forward, each added to the residual stream; the first of ``layer`` may be dense."""

    def __init__(self, config: DecoderConfig, layer: int = 0):
        super().__init__()
        moe = config.moe if config.moe is not None and layer >= config.moe.first_dense else None
        self.attention_norm = RMSNorm(config.dim, config.norm_eps)
        self.attention = Attention(config)
        self.feed_forward_norm = RMSNorm(config.dim, config.norm_eps)
        if moe is None:
            self.feed_forward = FeedForward(config.dim, config.hidden_dim)
        else:
            self.feed_forward = MixtureOfExperts(config.dim, config.expert_dim, moe)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor | None, routed: Tensor | None = None) -> Tensor:
        x = x + self.attention(self.attention_norm(x), cos, sin, mask)  # (rows, seq, dim)
        more = (routed,) if isinstance(self.feed_forward, MixtureOfExperts) else ()
        return x + self.feed_forward(self.feed_forward_norm(x), *more)


class Decoder(nn.Module):
    """A model that maps token ids to logits.

    Its weights follow ``weight_law``, drawn from torch's generator; on the meta device they have no values yet.
    """

    def __init__(self, config: DecoderConfig):
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocab_size, config.dim)
        self.layers = nn.ModuleDict({str(i): Block(config, i) for i in range(config.n_layers)})
        self.norm = RMSNorm(config.dim, config.norm_eps)
        self.head = nn.Linear(config.dim, config.vocab_size, bias=False)
        if config.tied_embeddings:
            self.head.weight = self.embedding.weight
        for name, parameter in self.named_parameters():
            kind, value = self.weight_law(name)
            nn.init.normal_(parameter, std=value) if kind == "normal" else nn.init.constant_(parameter, value)

    def forward(self, tokens: Tensor, positions: Tensor | None = None, document_ids: Tensor | None = None) -> Tensor:
        """Compute the logits, (rows, seq, vocab).

        Args:
            tokens: (rows, seq) int64.
            positions: (rows, seq) int64; by default 0, 1, 2 … in each row.
            document_ids: (rows, seq) int64; tokens attend only within their document. By default a row is one
                document. -1 is padding, which goes to no expert.

        Raises:
            ValueError: seq is longer than the config's ``max_seq_len``.
        """
        seq = tokens.shape[1]
        refuse_longer(self.config, seq)
        if positions is None:
            positions = torch.arange(seq, device=tokens.device).unsqueeze(0)
        x = self.embedding(tokens)
        cos, sin = rotary_tables(self.config, positions, x.dtype)
        mask = None if document_ids is None else document_mask(document_ids, x.dtype)
        routed = () if self.config.moe is None else (None if document_ids is None else document_ids >= 0,)
        for block in self.layers.values():
            x = block(x, cos, sin, mask, *routed)
        return self.head(self.norm(x))

    def weight_law(self, name: str) -> tuple[str, float]:
        """Return a parameter's initial distribution: ("normal", standard deviation) or ("constant", value).

        The law is the usual scaled normal (GPT-2; Megatron-LM, arXiv 1909.08053): 0.02 everywhere, divided by
        sqrt(2 · n_layers) for the projections that write into the residual stream; norms start at one.
        """
        return weight_law_of(self.config, name)


def weight_law_of(config: DecoderConfig, name: str) -> tuple[str, float]:
    """Return ``Decoder.weight_law`` of a name, for pipeline stages too."""
    if "norm" in name:
        return "constant", 1.0
    into_residual = name.endswith(("attention.wo.weight", "w_down.weight", "experts.w_down"))
    return "normal", 0.02 / math.sqrt(2 * config.n_layers) if into_residual else 0.02


def refuse_longer(config: DecoderConfig, seq: int) -> None:
    """Raise ValueError for sequences of more tokens than the config's ``max_seq_len``."""
    if seq > config.max_seq_len:
        raise ValueError(f"a sequence of {seq} tokens is longer than the model's max_seq_len = {config.max_seq_len}")


def document_mask(document_ids: Tensor, dtype: torch.dtype) -> Tensor:
    """Build the mask (rows, 1, seq, seq): 0 for positions up to a token's own, in the same document, and −∞ elsewhere.

    Attention makes and keeps such numbers of a boolean mask in each block; given them, all blocks keep one tensor.
    """
    seq = document_ids.shape[1]
    same = document_ids.unsqueeze(-1) == document_ids.unsqueeze(-2)
    allowed = (same & torch.ones(seq, seq, dtype=torch.bool, device=document_ids.device).tril()).unsqueeze(1)
    return torch.zeros_like(allowed, dtype=dtype).masked_fill_(~allowed, -torch.inf)
