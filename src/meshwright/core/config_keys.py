"""Name the keys under which configs state a model's sizes: those of transformers and of this library's decoder.

Torch-free.
"""

from __future__ import annotations

LAYERS = ("num_hidden_layers", "n_layers", "n_layer", "num_layers")
WIDTH = ("hidden_size", "n_embd", "d_model", "dim")
HEADS = ("num_attention_heads", "n_heads", "n_head")
KEY_HEADS = ("num_key_value_heads", "n_kv_heads", "num_kv_heads")
HIDDEN = ("intermediate_size", "hidden_dim", "ffn_dim", "n_inner", "ffn_hidden_size", "dff", "dim_ff")
EXPERT_HIDDEN = ("moe_intermediate_size", "shared_expert_intermediate_size", "shared_intermediate_size")
EXPERTS = ("n_routed_experts", "num_experts", "num_local_experts", "moe_num_experts")
TOP_K = ("num_experts_per_tok", "moe_topk", "moe_top_k", "top_k_experts", "moe_k", "num_selected_experts", "top_k")
"""Experts that a token goes to."""
LENGTHS = ("max_seq_len", "max_position_embeddings", "n_positions")
"""Longest sequence, in tokens."""
SECTIONS = ("moe", "ffn_config", "attn_config")
"""Configs inside a config of text, as ``DecoderConfig`` and DBRX have them."""
