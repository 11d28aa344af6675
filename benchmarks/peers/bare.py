"""Torch by hand: what its tutorials build, with the mean cross entropy that people write."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from .problem import TOKENS, Question, mean

PACKAGES: list[str] = []


def build(question: Question):
    """Return a function that trains on the microbatches of a step and returns the loss it would log."""
    mesh = init_device_mesh(question.device, (question.world,))
    if question.layout == "pipeline":
        return pipeline(question, Stage(question.model(), question.rank))
    model = question.model()
    if question.layout in ("zero3", "zero2"):
        for block in model.model.layers:
            fully_shard(block, mesh=mesh, reshard_after_forward=question.layout == "zero3")
        fully_shard(model, mesh=mesh, reshard_after_forward=False)
    elif question.layout == "ddp":
        model = nn.parallel.DistributedDataParallel(model)
    elif question.layout in ("tensor", "sequence"):
        cut(model, mesh, question.layout == "sequence")
    else:
        raise NotImplementedError(f"torch has no {question.layout} parallelism that a person writes by hand")
    return loop(question, model)


def loop(question: Question, model: nn.Module, logits=None):
    """Return the step that all systems share whose model is called and whose optimizer is torch's.

    Args:
        logits: calls the model on tokens; by default as a model of transformers is called.
    """
    optimizer = question.optimizer(model.parameters())
    positions = torch.arange(TOKENS, device=question.device)[None] if question.layout == "sequence" else None
    logits = logits or (lambda tokens: model(input_ids=tokens, position_ids=positions).logits)

    def step(parts) -> float:
        loss = 0.0
        for number, part in enumerate(parts):
            last = number == len(parts) - 1
            if question.layout in ("zero2", "ddp") and len(parts) > 1:
                set_sync(model, last)
            share = mean(logits(part["tokens"]), part["labels"]) / len(parts)
            share.backward()
            loss = loss + share.detach()
        if question.max_norm:
            clip(model, question.max_norm)
        optimizer.step()
        optimizer.zero_grad()
        if question.cuts_rows:
            dist.all_reduce(loss, op=dist.ReduceOp.SUM)
            loss = loss / question.world
        return float(loss)

    return step


def clip(model: nn.Module, max_norm: float) -> None:
    """Clip by the norm of all gradients, where torch's function takes no plain tensors beside DTensors."""
    kinds = [[], []]
    for parameter in model.parameters():
        kinds[isinstance(parameter, DTensor)].append(parameter)
    norms = [nn.utils.get_total_norm(p.grad for p in kind) for kind in kinds if kind]
    norms = [norm.full_tensor() if isinstance(norm, DTensor) else norm for norm in norms]
    norm = torch.linalg.vector_norm(torch.stack(norms))
    for kind in kinds:
        nn.utils.clip_grads_with_norm_(kind, max_norm, norm)


def set_sync(model: nn.Module, on: bool) -> None:
    if isinstance(model, nn.parallel.DistributedDataParallel):
        model.require_backward_grad_sync = on
    else:
        model.set_requires_gradient_sync(on)


def cut(model: nn.Module, mesh: DeviceMesh, sequence: bool) -> None:
    """Cut attention and feed-forward by columns, then rows; with ``sequence`` norms hold a part of each row."""
    rows = RowwiseParallel(output_layouts=Shard(1)) if sequence else RowwiseParallel()
    plan = {f"self_attn.{name}_proj": ColwiseParallel() for name in "qkv"}
    plan |= {"self_attn.o_proj": rows, "mlp.down_proj": rows}
    plan |= {"mlp.gate_proj": ColwiseParallel(), "mlp.up_proj": ColwiseParallel()}
    if sequence:
        gathered = {"hidden_states": Shard(1)}, {"hidden_states": Replicate()}
        plan |= {"input_layernorm": SequenceParallel(), "post_attention_layernorm": SequenceParallel()}
        plan["self_attn"] = PrepareModuleInput(input_kwarg_layouts=gathered[0], desired_input_kwarg_layouts=gathered[1])
        plan["mlp"] = PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Replicate())
    for block in model.model.layers:
        parallelize_module(block, mesh, plan)
    beside = {
        "model.embed_tokens": RowwiseParallel(
            input_layouts=Replicate(), output_layouts=Shard(1) if sequence else Replicate()
        ),
        "lm_head": ColwiseParallel(input_layouts=Shard(1) if sequence else Replicate(), output_layouts=Replicate()),
    }
    if sequence:
        beside["model.norm"] = SequenceParallel()
    parallelize_module(model, mesh, beside)


class Stage(nn.Module):
    """One of two halves of a Llama's blocks."""

    def __init__(self, model: nn.Module, rank: int) -> None:
        super().__init__()
        half = len(model.model.layers) // 2
        self.embed = model.model.embed_tokens if rank == 0 else None
        self.layers = model.model.layers[:half] if rank == 0 else model.model.layers[half:]
        self.rotary = model.model.rotary_emb
        self.norm, self.head = (model.model.norm, model.lm_head) if rank else (None, None)

    def forward(self, x):
        hidden = x if self.embed is None else self.embed(x)
        positions = torch.arange(hidden.shape[1], device=hidden.device)[None]
        table = self.rotary(hidden, positions)
        for block in self.layers:
            hidden = block(hidden, position_embeddings=table, position_ids=positions)
        return hidden if self.norm is None else self.head(self.norm(hidden))


def pipeline(question: Question, module: nn.Module):
    """Return a step of 1F1B over the microbatches, in which this rank's stage is ``module``."""
    stage = PipelineStage(module, question.rank, question.world, torch.device(question.device))
    schedule = Schedule1F1B(stage, question.microbatches, loss_fn=mean)
    optimizer = question.optimizer(module.parameters())

    def step(parts) -> float:
        tokens, labels = (torch.cat([part[key] for part in parts]) for key in ("tokens", "labels"))
        losses: list[torch.Tensor] = []
        if question.rank:
            schedule.step(target=labels, losses=losses)
        else:
            schedule.step(tokens)
        if question.max_norm:  # of this stage's own gradients, then of both
            norm = nn.utils.get_total_norm(p.grad for p in module.parameters()) ** 2
            dist.all_reduce(norm)
            nn.utils.clip_grads_with_norm_(module.parameters(), question.max_norm, norm**0.5)
        optimizer.step()
        optimizer.zero_grad()
        loss = torch.stack(losses).mean().detach() if losses else torch.zeros(())
        dist.all_reduce(loss)
        return float(loss)

    return step
