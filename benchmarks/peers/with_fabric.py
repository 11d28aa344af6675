"""Lightning Fabric: DDP, and FSDP2 or tensor parallelism by a function that the user writes."""

from __future__ import annotations

import torch

from .bare import cut
from .problem import Question, mean

PACKAGES = ["lightning-fabric"]


def build(question: Question):
    from lightning_fabric import Fabric
    from lightning_fabric.strategies import DDPStrategy, ModelParallelStrategy
    from torch.distributed.fsdp import fully_shard

    def lay_out(model, mesh):
        if question.layout == "tensor":
            cut(model, mesh["tensor_parallel"], False)
            return model
        for block in model.model.layers:
            fully_shard(block, mesh=mesh["data_parallel"], reshard_after_forward=question.layout == "zero3")
        return fully_shard(model, mesh=mesh["data_parallel"], reshard_after_forward=False)

    if question.layout in ("zero3", "zero2"):
        strategy = ModelParallelStrategy(lay_out, data_parallel_size=question.world, tensor_parallel_size=1)
    elif question.layout == "tensor":
        strategy = ModelParallelStrategy(lay_out, data_parallel_size=1, tensor_parallel_size=question.world)
    elif question.layout == "ddp":
        strategy = DDPStrategy()
    else:
        raise NotImplementedError(f"no {question.layout}")
    fabric = Fabric(
        accelerator="cpu" if question.device == "cpu" else "cuda", devices=question.world, strategy=strategy
    )
    fabric.launch()
    model = fabric.setup_module(question.model())
    optimizer = fabric.setup_optimizers(question.optimizer(model.parameters()))

    def step(parts) -> float:
        loss = torch.zeros((), device=question.device)
        for number, part in enumerate(parts):
            with fabric.no_backward_sync(model, enabled=number < len(parts) - 1 and question.layout != "tensor"):
                share = mean(model(input_ids=part["tokens"]).logits, part["labels"]) / len(parts)
                fabric.backward(share)
            loss = loss + share.detach()
        if question.max_norm:
            fabric.clip_gradients(model, optimizer, max_norm=question.max_norm)
        optimizer.step()
        optimizer.zero_grad()
        return float(fabric.all_reduce(loss, reduce_op="mean"))

    return step
