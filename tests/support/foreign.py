"""Models that know nothing of meshwright: a post-norm encoder of our own making, and two tiny Hugging Face models."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Attention(nn.Module):
    """Causal multi-head attention with biases."""

    def __init__(self, dim: int, heads: int):
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(dim, 3 * dim)
        self.out = nn.Linear(dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        return self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(-2))


class Layer(nn.Module):
    def __init__(self, dim: int, heads: int):
        super().__init__()
        self.attention = Attention(dim, heads)
        self.first = nn.LayerNorm(dim)
        self.mlp = nn.Sequential(nn.Linear(dim, 2 * dim + 1), nn.GELU(), nn.Linear(2 * dim + 1, dim))
        self.second = nn.LayerNorm(dim)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x + self.attention(x))
        return self.second(x + self.mlp(x))


class Waves(nn.Module):
    """Sinusoidal positions in a buffer that only ``reset_parameters`` can fill."""

    def __init__(self, seq: int, dim: int):
        super().__init__()
        self.register_buffer("table", torch.empty(seq, dim))
        if not self.table.is_meta:
            self.reset_parameters()

    def reset_parameters(self) -> None:
        seq, dim = self.table.shape
        angles = torch.arange(seq).unsqueeze(1) * torch.exp(torch.arange(0, dim, 2) * (-math.log(10_000.0) / dim))
        self.table.copy_(torch.stack((angles.sin(), angles.cos()), dim=-1).flatten(1))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.table[: x.shape[1]]


class Output:
    """An object in which torch's tree walkers see no tensor."""

    def __init__(self, logits: Tensor):
        self.logits = logits


class Encoder(nn.Module):
    """forward(input_ids) -> logits, or (``wrapped``) an object with ``.logits``."""

    def __init__(self, blocks: int = 3, wrapped: bool = False, tied: bool = False):
        super().__init__()
        self.wrapped = wrapped
        self.embed = nn.Embedding(257, 10)
        self.waves = Waves(16, 10)
        self.stack = nn.Sequential(*(Layer(10, 5) for _ in range(blocks)))
        self.out = nn.Linear(10, 257)
        if tied:
            self.out.weight = self.embed.weight

    def forward(self, input_ids: Tensor) -> Tensor | Output:
        logits = self.out(self.stack(self.waves(self.embed(input_ids))))
        return Output(logits) if self.wrapped else logits


def on_meta() -> nn.Module:
    """A factory: meshwright calls it on the meta device, and each module's ``reset_parameters`` makes the weights."""
    return Encoder()


def on_meta_tied() -> nn.Module:
    return Encoder(tied=True)


def seeded(build, **options) -> nn.Module:
    """Build with weights on the CPU, equal on every rank, and leave torch's generator as it was."""
    with torch.random.fork_rng(devices=[]), torch.device("cpu"):
        torch.manual_seed(1)
        return build(**options)


def on_cpu() -> nn.Module:
    return seeded(Encoder, wrapped=True)


def without_blocks() -> nn.Module:
    """One layer only, and an output in which torch finds no tensor: sharding has no block to hold on to."""
    return seeded(Encoder, blocks=1, wrapped=True)


def tiny_llama() -> nn.Module:
    from transformers import AutoModelForCausalLM, LlamaConfig

    config = LlamaConfig(
        vocab_size=257,
        hidden_size=20,
        intermediate_size=27,
        num_hidden_layers=3,
        num_attention_heads=5,
        num_key_value_heads=1,
        max_position_embeddings=16,
        tie_word_embeddings=False,
        use_cache=False,
    )
    return seeded(AutoModelForCausalLM.from_config, config=config)


def tiny_gpt2() -> nn.Module:
    """Tied embeddings, learned positions, packed qkv as Conv1D, biases everywhere."""
    from transformers import AutoModelForCausalLM, GPT2Config

    config = GPT2Config(
        vocab_size=257,
        n_positions=16,
        n_embd=20,
        n_layer=3,
        n_head=5,
        bos_token_id=1,
        eos_token_id=1,
        resid_pdrop=0,
        embd_pdrop=0,
        attn_pdrop=0,
        use_cache=False,
    )
    return seeded(AutoModelForCausalLM.from_config, config=config)
