"""Train on eight rows a step of which other numbers of tokens are learnt, each rank with the mean over its own.

In one process, or under torchrun ``--with fsdp2|ddp|accelerate|fabric|pipeline``.
"""

import argparse

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

cli = argparse.ArgumentParser()
cli.add_argument("--with", dest="tool", default="")
tool = cli.parse_args().tool


def loss_of(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


torch.manual_seed(0)
model = nn.Sequential(nn.Embedding(64, 32), nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32), nn.Linear(32, 64))
backward, rank, ranks = torch.Tensor.backward, 0, 1
if tool in ("fsdp2", "ddp", "pipeline"):
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
if tool == "fsdp2":
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    fully_shard(model, mesh=init_device_mesh("cpu", (ranks,)))
elif tool == "ddp":
    model = nn.parallel.DistributedDataParallel(model)
elif tool == "pipeline":
    from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

    model = model[:2] if rank == 0 else model[2:]
    schedule = ScheduleGPipe(PipelineStage(model, rank, ranks, torch.device("cpu")), 4, loss_fn=loss_of)
    rank, ranks = 0, 1  # each stage has all rows
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
if tool == "accelerate":
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    model, optimizer = accelerator.prepare(model, optimizer)
    backward, rank, ranks = accelerator.backward, accelerator.process_index, accelerator.num_processes
elif tool == "fabric":
    from lightning_fabric import Fabric

    fabric = Fabric(accelerator="cpu", devices=2, strategy="ddp")
    fabric.launch()
    model, optimizer = fabric.setup(model, optimizer)
    backward, rank, ranks = fabric.backward, fabric.global_rank, fabric.world_size
for step in range(3):
    draws = torch.Generator().manual_seed(step)
    rows = torch.randint(64, (8, 17), generator=draws)
    prompts = torch.randint(14, (8, 1), generator=draws)
    labels = rows[:, 1:].masked_fill(torch.arange(16) < prompts, -100).chunk(ranks)[rank]
    inputs = rows[:, :-1].chunk(ranks)[rank]
    if tool == "pipeline":
        schedule.step(inputs) if dist.get_rank() == 0 else schedule.step(target=labels)
    else:
        backward(loss_of(model(inputs), labels))
    optimizer.step()
    optimizer.zero_grad()
if dist.is_initialized():
    dist.destroy_process_group()
