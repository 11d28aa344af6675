"""What stands for your own model and rows in these scripts: a small Llama, and rows of 6 to 16 tokens."""

from __future__ import annotations

import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
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
    words = Tokenizer(WordLevel({"<pad>": 0, **{f"w{number}": number for number in range(1, 64)}}, unk_token="<pad>"))
    return PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="w1")
