"""Stand for your own model and data in these scripts: a small Llama or decoder, rows of tokens, batches of a rank."""

from __future__ import annotations

from collections.abc import Iterator

import tokenizers
import torch
import torch.nn.functional as F
from tokenizers.models import WordLevel
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast


def your_model() -> LlamaForCausalLM:
    """Return the same weights on every rank."""
    torch.manual_seed(0)
    heads = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=64, hidden_size=32, intermediate_size=48, **heads))


def your_rows(count: int = 48, shortest: int = 6, longest: int = 16) -> list[dict[str, list[int]]]:
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(shortest, longest + 1, (count,), generator=generator).tolist()
    return [{"input_ids": torch.randint(1, 64, (length,), generator=generator).tolist()} for length in lengths]


def padded(rows: list[dict[str, list[int]]]) -> dict[str, torch.Tensor]:
    """Collate rows of other lengths."""
    ids = [torch.tensor(row["input_ids"]) for row in rows]
    return {
        "input_ids": pad_sequence(ids, batch_first=True),
        "attention_mask": pad_sequence([torch.ones_like(row) for row in ids], batch_first=True),
        "labels": pad_sequence(ids, batch_first=True, padding_value=-100),
    }


def your_tokenizer() -> PreTrainedTokenizerFast:
    words = tokenizers.Tokenizer(
        WordLevel({"<pad>": 0, **{f"w{number}": number for number in range(1, 64)}}, unk_token="<pad>")
    )
    return PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="w1")


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


class YourDecoder(nn.Module):
    """A decoder of one's own: token ids (rows, seq) int64 to logits (rows, seq, 64)."""

    def __init__(self, dim: int = 32, layers: int = 2):
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(64, dim)
        self.layers = nn.ModuleDict({str(number): Block(dim, 4) for number in range(layers)})
        self.norm, self.head = nn.RMSNorm(dim), nn.Linear(dim, 64, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for layer in self.layers.values():
            x = layer(x)
        return self.head(self.norm(x))


def your_batches(
    rank: int, ranks: int, steps: int = 20, rows: int = 8, seq_len: int = 24
) -> Iterator[dict[str, Tensor]]:
    """Yield a rank's share of each step's rows: ``input_ids`` and shifted ``labels``, (rows / ranks, seq_len) int64.

    A row counts up by a stride of its own, so there is something to learn.
    """
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        start = torch.randint(64, (rows, 1), generator=generator)
        stride = torch.randint(1, 5, (rows, 1), generator=generator)
        tokens = ((start + stride * torch.arange(seq_len + 1)) % 64).chunk(ranks)[rank]
        yield {"input_ids": tokens[:, :-1], "labels": tokens[:, 1:]}
