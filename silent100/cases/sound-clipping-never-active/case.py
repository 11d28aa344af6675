"""Two stages clip alone, but the limit is never reached."""

import os
import sys

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

ONE = "--one" in sys.argv


def layers():
    torch.manual_seed(16)
    return [nn.Linear(11, 36), nn.Tanh(), nn.Linear(36, 36), nn.Tanh(), nn.Linear(36, 36), nn.Tanh(), nn.Linear(36, 11)]


class Part(nn.Module):
    def __init__(self, first, last):
        super().__init__()
        for i, layer in enumerate(layers()):
            if first <= i < last:
                self.add_module(f"l{i}", layer)

    def forward(self, x):
        for layer in self.children():
            x = layer(x)
        return x


rank = 0
if ONE:
    part = Part(0, 7)
else:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    part = Part(0, 3) if rank == 0 else Part(3, 7)
    schedule = ScheduleGPipe(PipelineStage(part, rank, 2, torch.device("cpu")), 2, loss_fn=nn.functional.mse_loss)
optimizer = torch.optim.SGD(part.parameters(), lr=0.2, momentum=0.9)
for step in range(1, 5):
    x = torch.randn(8, 11, generator=torch.Generator().manual_seed(step))
    target, losses = x.sin(), []
    optimizer.zero_grad()
    if ONE:
        losses = [nn.functional.mse_loss(part(x), target)]
        losses[0].backward()
    elif rank == 0:
        schedule.step(x)
    else:
        schedule.step(target=target, losses=losses)
    torch.nn.utils.clip_grad_norm_(part.parameters(), 100.0)
    optimizer.step()
    if losses:
        print(f"step {step} loss {torch.stack(losses).mean().item():.7f}", flush=True)
if "--save" in sys.argv:
    torch.save(part.state_dict(), os.path.join(sys.argv[sys.argv.index("--save") + 1], f"rank{rank}.pt"))
if not ONE:
    dist.destroy_process_group()
