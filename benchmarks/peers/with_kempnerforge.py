"""KempnerForge: its own Transformer with the same weights, in a checkout on ``PYTHONPATH``."""

from __future__ import annotations

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy

from .bare import loop, pipeline
from .problem import TOKENS, VOCABULARY, Question

PACKAGES: list[str] = []
AXES = {"zero3": "dp_shard", "zero2": "dp_shard", "sequence": "tp", "pipeline": "pp"}
NAMES = {
    "model.embed_tokens": "token_embedding.embedding",
    "model.layers": "layers",
    "self_attn": "attention",
    "input_layernorm": "attention_norm",
    "post_attention_layernorm": "mlp_norm",
    "model.norm": "norm",
    "lm_head": "output_head.proj",
}


def build(question: Question):
    from kempnerforge.config.schema import ActivationCheckpointing, ModelConfig
    from kempnerforge.distributed import apply_ac, apply_fsdp2, apply_tensor_parallel
    from kempnerforge.distributed.pipeline_parallel import build_stage_module
    from kempnerforge.model.transformer import Transformer

    if question.layout not in AXES:
        raise NotImplementedError(f"no {question.layout}")
    of = question.config
    config = ModelConfig(
        dim=of.hidden_size,
        n_layers=of.num_hidden_layers,
        n_heads=of.num_attention_heads,
        vocab_size=VOCABULARY,
        ffn_hidden_dim=of.intermediate_size,
        norm_eps=of.rms_norm_eps,
        max_seq_len=TOKENS,
    )
    mesh = init_device_mesh(question.device, (question.world,), mesh_dim_names=(AXES[question.layout],))
    stages = question.layout == "pipeline"
    model = build_stage_module(config, question.rank, question.world) if stages else Transformer(config)
    question.give_weights(model.to(question.device), NAMES)
    if question.layout == "sequence":
        apply_tensor_parallel(model, mesh)
    if question.recomputes:
        apply_ac(model, ActivationCheckpointing.full)
    if stages:
        return pipeline(question, model)
    exact = MixedPrecisionPolicy(torch.float32, torch.float32, torch.float32)
    apply_fsdp2(model, mesh, exact, reshard_after_forward=question.layout == "zero3")
    return loop(question, model, model)
