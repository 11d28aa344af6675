"""torchtitan: its own Llama 3 with the same weights, over ``partial_dtensor``: of its three back ends the plainest."""

from __future__ import annotations

from types import SimpleNamespace

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule

from .problem import TOKENS, VOCABULARY, Question

PACKAGES = ["torchtitan", "triton"]


def build(question: Question):
    import torchtitan.tools.utils as machine

    machine.device_type = question.device  # it takes a machine without an accelerator for one with CUDA
    from torchtitan.components.loss import cross_entropy_loss
    from torchtitan.config import CompileConfig, ParallelismConfig, TrainingConfig
    from torchtitan.distributed import ParallelDims
    from torchtitan.distributed.activation_checkpoint import FullAC
    from torchtitan.distributed.utils import clip_grad_norm_, set_spmd_backend
    from torchtitan.models import llama3
    from torchtitan.models.common import ComplexRoPE, Embedding, Linear, RMSNorm
    from torchtitan.models.common.attention import ScaledDotProductAttention

    if question.layout not in ("zero3", "zero2", "tensor", "sequence"):
        raise NotImplementedError(f"no {question.layout} that its own trainer does not run")
    of, tensor = question.config, question.layout in ("tensor", "sequence")
    width, heads = of.hidden_size, of.num_attention_heads
    rope = ComplexRoPE.Config(dim=width // heads, max_seq_len=TOKENS, theta=of.rope_parameters["rope_theta"])
    blocks = llama3._build_llama3_layers(
        n_layers=of.num_hidden_layers,
        dim=width,
        n_heads=heads,
        hidden_dim=of.intermediate_size,
        rope=rope,
        fuse_qkv=False,
        attn_backend="varlen",
    )
    for block in blocks:
        block.attention_norm.eps = block.ffn_norm.eps = of.rms_norm_eps
        # its language models refuse this by name, and nothing else of its own trains on a CPU
        block.attention.inner_attention = ScaledDotProductAttention.Config()
    config = llama3.Llama3Model.Config(
        dim=width,
        vocab_size=VOCABULARY,
        tok_embeddings=Embedding.Config(num_embeddings=VOCABULARY, embedding_dim=width),
        norm=RMSNorm.Config(normalized_shape=width, eps=of.rms_norm_eps),
        lm_head=Linear.Config(in_features=width, out_features=VOCABULARY),
        layers=blocks,
    )
    set_spmd_backend("partial_dtensor")
    parallelism = ParallelismConfig(
        data_parallel_shard_degree=1 if tensor else question.world,
        tensor_parallel_degree=question.world if tensor else 1,
        enable_sequence_parallel=question.layout == "sequence",
        fsdp_reshard_after_forward="always" if question.layout == "zero3" else "never",
        spmd_backend="partial_dtensor",
    )
    config.update_from_config(config=SimpleNamespace(parallelism=parallelism))
    model = config.build()
    weights = llama3.Llama3StateDictAdapter(config, None).from_hf(question.model().state_dict())
    model.load_state_dict(weights)
    model = llama3.parallelize_llama(
        model.to(question.device),
        parallel_dims=ParallelDims.from_config(parallelism, question.world),
        training=TrainingConfig(mixed_precision_param="float32"),
        parallelism=parallelism,
        compile_config=CompileConfig(),
        ac_config=FullAC.Config() if question.recomputes else None,
        dump_folder="",
    )
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)  # gloo has no other sum that is not divided
    optimizer = question.optimizer(model.parameters())

    def step(parts) -> float:
        tokens = torch.stack([(part["labels"] != -100).sum() for part in parts]).sum()
        if question.cuts_rows:
            dist.all_reduce(tokens)
        loss = torch.zeros((), device=question.device)
        for part in parts:
            share = cross_entropy_loss(model(part["tokens"]), part["labels"]) / tokens
            share.backward()
            loss = loss + share.detach()
        if question.max_norm:
            clip_grad_norm_(model.parameters(), question.max_norm, foreach=True)
        optimizer.step()
        optimizer.zero_grad()
        if question.cuts_rows:
            dist.all_reduce(loss)
        return float(loss)

    return step
