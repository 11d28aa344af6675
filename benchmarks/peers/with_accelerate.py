"""Accelerate: DDP and FSDP2, whose plugin it passes over on a CPU without a word: its state is set by hand there."""

from __future__ import annotations

import torch

from .problem import Question, mean

PACKAGES = ["accelerate"]


def build(question: Question):
    from accelerate import Accelerator, FullyShardedDataParallelPlugin
    from accelerate.utils import DistributedType

    sharded = question.layout in ("zero3", "zero2")
    if not sharded and question.layout != "ddp":
        raise NotImplementedError(f"no {question.layout} of its own: transformers' plans, in with_transformers.py")
    plugin = None
    if sharded:
        plugin = FullyShardedDataParallelPlugin(
            fsdp_version=2,
            reshard_after_forward=question.layout == "zero3",
            auto_wrap_policy="transformer_based_wrap",
            transformer_cls_names_to_wrap=["LlamaDecoderLayer"],
        )
    accelerator = Accelerator(
        cpu=question.device == "cpu", fsdp_plugin=plugin, gradient_accumulation_steps=question.microbatches
    )
    if sharded:
        accelerator.state.distributed_type, accelerator.state.fsdp_plugin = DistributedType.FSDP, plugin
    model = question.model()
    model, optimizer = accelerator.prepare(model, question.optimizer(model.parameters()))

    def step(parts) -> float:
        loss = torch.zeros((), device=question.device)
        for part in parts:
            with accelerator.accumulate(model):
                share = mean(model(input_ids=part["tokens"]).logits, part["labels"])
                accelerator.backward(share)
                loss = loss + share.detach() / len(parts)
                if question.max_norm and accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), question.max_norm)
                optimizer.step()
                optimizer.zero_grad()
        return float(accelerator.reduce(loss, "mean"))

    return step
