"""Tiny random models of many Hugging Face families, saved as their users find them; no download."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from torch import nn

VOCABULARY = 96
SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 64,
    "max_position_embeddings": 64,
    "head_dim": 8,
}
EXPERTS = {"moe_intermediate_size": 32, "num_experts_per_tok": 2}
OF_ONE_WORD: dict[str, Any] = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}
OWN: dict[str, dict[str, Any]] = {
    "apertus": {},
    "bloom": {"n_layer": 2, "n_head": 4},
    "cohere": {},
    "falcon": {"head_dim": None},
    "gemma2": {},
    "gemma3_text": {},
    "glm4": {"pad_token_id": 0},
    "gpt2": OF_ONE_WORD,
    "gpt_neox": {},
    "gpt_oss": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "gptj": OF_ONE_WORD | {"rotary_dim": 4},
    "granite": {},
    "llama": {},
    "mistral": {},
    "mixtral": {"num_local_experts": 4},
    "mpt": {"d_model": 32, "n_heads": 4, "n_layers": 2, "max_seq_len": 64},
    "olmo2": {},
    "opt": {"ffn_dim": 64, "word_embed_proj_dim": 32},
    "phi": {},
    "phi3": {"pad_token_id": 0},
    "qwen2": {},
    "qwen3": {},
    "qwen3_moe": {"num_experts": 4, **EXPERTS},
    "smollm3": {"pad_token_id": 0},
    "stablelm": {},
    "starcoder2": {},
}
"""Families, and what their configs need besides the sizes (None: a key that they do not take)."""
MORE: dict[str, dict[str, Any]] = {
    "arcee": {},
    "biogpt": {},
    "cohere_qk": {"of": "cohere", "use_qk_norm": True},
    "exaone4": {"layer_types": ["full_attention"] * 2},
    "falcon_alibi": {"of": "falcon", "head_dim": None, "alibi": True, "multi_query": False, "parallel_attn": False},
    "falcon_grouped": {"of": "falcon", "head_dim": None, "num_kv_heads": 2, "new_decoder_architecture": True},
    "gpt_bigcode": OF_ONE_WORD,
    "gpt_neo": {"num_layers": 2, "attention_types": [[["global", "local"], 1]]},
    "helium": {},
    "nemotron": {},
    "olmo3": {},
    "persimmon": {},
    "stablelm_parallel": {"of": "stablelm", "use_parallel_residual": True},
}
"""Families that compute otherwise than those do; "of": the name under which transformers knows them."""
LATENT = {
    "first_k_dense_replace": 1,
    "kv_lora_rank": 16,
    "n_group": 1,
    "n_routed_experts": 4,
    "num_key_value_heads": 4,
    "q_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "topk_group": 1,
    "v_head_dim": 8,
}
SPARSE: dict[str, dict[str, Any]] = {
    "deepseek_v2": LATENT | EXPERTS,
    "deepseek_v3": LATENT | EXPERTS,
    "glm4_moe": {
        "first_k_dense_replace": 1,
        "n_group": 1,
        "n_routed_experts": 4,
        "pad_token_id": 0,
        "topk_group": 1,
        **EXPERTS,
    },
    "granitemoe": {"num_experts_per_tok": 2, "num_local_experts": 4},
    "hunyuan_v1_moe": {"num_experts": 4},
    "olmoe": {"num_experts": 4, "num_experts_per_tok": 2},
    "phimoe": {"num_local_experts": 4},
    "qwen2_moe": {"num_experts": 4, "shared_expert_intermediate_size": 32, **EXPERTS},
}
"""Families with experts, besides ``gpt_oss``, ``mixtral`` and ``qwen3_moe``."""
RECURRENT: dict[str, dict[str, Any]] = {
    "jamba": {
        "attn_layer_offset": 1,
        "attn_layer_period": 2,
        "expert_layer_offset": 1,
        "expert_layer_period": 2,
        "mamba_d_state": 4,
        "mamba_dt_rank": 4,
        "num_experts": 4,
        "use_mamba_kernels": False,
    },
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "mamba2": {"num_heads": 8, "state_size": 8, "n_groups": 4, "chunk_size": 8},
    "qwen3_next": {
        "layer_types": ["linear_attention", "full_attention"],
        "linear_key_head_dim": 8,
        "linear_num_key_heads": 4,
        "linear_num_value_heads": 8,
        "linear_value_head_dim": 8,
        "num_experts": 4,
        "shared_expert_intermediate_size": 32,
        **EXPERTS,
    },
    "recurrent_gemma": {"num_hidden_layers": 3, "lru_width": 32},
    "rwkv": {"attention_hidden_size": 32},
}
"""Families whose tokens meet in recurrences, linear attention or convolutions."""


def config_of(family: str, **changes: Any) -> Any:
    from transformers import AutoConfig

    given = SIZES | (OWN | MORE | SPARSE | RECURRENT)[family] | changes
    sizes = {key: value for key, value in given.items() if value is not None}
    config = AutoConfig.for_model(sizes.pop("of", family)).__class__(**sizes)
    for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
        if isinstance(getattr(config, name, None), int) and getattr(config, name) >= VOCABULARY:
            setattr(config, name, 1)
    return config


def on_cpu(config: Any, seed: int = 1) -> nn.Module:
    """As transformers itself builds it, then every parameter random, norms and biases too."""
    from transformers import AutoModelForCausalLM

    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config)
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape) / 8)
    return model.eval()


def tied() -> nn.Module:
    """A factory: two names of one weight, packed projections, and an initialiser of the whole that writes into its
    parts.
    """
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_config(config_of("gpt2"))


def with_experts() -> nn.Module:
    """A factory: stacked experts, and tables that only the constructor fills."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_config(config_of("qwen3_moe"))


def saved(folder: Path, family: str = "llama", *, seed: int = 1, file_size: str = "5GB", **changes: Any) -> nn.Module:
    """A model of a family, and its folder."""
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    model = on_cpu(config_of(family, **changes), seed)
    model.save_pretrained(folder, max_shard_size=file_size)  # type: ignore[operator]
    return model


def some_tokens(rows: int = 2, seq: int = 12) -> torch.Tensor:
    return torch.randint(0, VOCABULARY, (rows, seq), generator=torch.Generator().manual_seed(0))


LETTERS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ.,:()_='0123456789"


def save_tokenizer(folder: Path) -> None:
    """A tokenizer.json of single characters that fits the vocabulary."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    tokenizer = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate([*LETTERS, "Ġ", "Ċ"])}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|endoftext|>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text('{"eos_token": "<|endoftext|>"}')
