"""The setting that the scripts of this folder share: two tiny models, and twenty batches of a rank."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

VOCABULARY = 96


def build_model() -> LlamaForCausalLM:
    """Build a Llama of transformers; ranks that build it get the same weights."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
    )
    return LlamaForCausalLM(config)


class Block(nn.Module):
    """Attends to earlier tokens, then transforms each token."""

    def __init__(self, dim: int, heads: int):
        super().__init__()
        self.heads = heads
        self.attention_norm, self.mlp_norm = nn.RMSNorm(dim), nn.RMSNorm(dim)
        self.qkv, self.out = nn.Linear(dim, 3 * dim, bias=False), nn.Linear(dim, dim, bias=False)
        self.up, self.down = nn.Linear(dim, 2 * dim), nn.Linear(2 * dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.attention_norm(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.mlp_norm(x))))


class Decoder(nn.Module):
    """A decoder of one's own: token ids (rows, seq) int64 to logits (rows, seq, vocabulary)."""

    def __init__(self, dim: int = 32, layers: int = 2):
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(VOCABULARY, dim)
        self.layers = nn.ModuleDict({str(number): Block(dim, 4) for number in range(layers)})
        self.norm, self.head = nn.RMSNorm(dim), nn.Linear(dim, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for layer in self.layers.values():
            x = layer(x)
        return self.head(self.norm(x))


def batches(rank: int, ranks: int, steps: int = 20, rows: int = 8, seq_len: int = 24) -> Iterator[dict[str, Tensor]]:
    """Yield a rank's share of each step's rows: ``input_ids`` and shifted ``labels``, (rows / ranks, seq_len) int64.

    A row counts up by a stride of its own, so there is something to learn.
    """
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        start = torch.randint(VOCABULARY, (rows, 1), generator=generator)
        stride = torch.randint(1, 5, (rows, 1), generator=generator)
        tokens = ((start + stride * torch.arange(seq_len + 1)) % VOCABULARY).chunk(ranks)[rank]
        yield {"input_ids": tokens[:, :-1], "labels": tokens[:, 1:]}
