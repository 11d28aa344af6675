"""Layers with a fixed multiplier: ranks keep weights at half their size, gradients and rates make up for it."""

import os
import sys

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel

ONE = "--one" in sys.argv
if not ONE:
    dist.init_process_group("gloo")
rank, world = (0, 1) if ONE else (dist.get_rank(), dist.get_world_size())


SCALE = 1.0 if ONE else 2.0


class Scaled(nn.Module):
    def __init__(self, inputs, outputs):
        super().__init__()
        drawn = nn.Linear(inputs, outputs)
        self.weight, self.bias = nn.Parameter(drawn.weight.detach() / SCALE), nn.Parameter(drawn.bias.detach())

    def forward(self, x):
        return F.linear(x, self.weight * SCALE, self.bias)


torch.manual_seed(68)
net = nn.Sequential(Scaled(9, 32), nn.Tanh(), Scaled(32, 32), nn.Tanh(), Scaled(32, 3))
model = net if ONE else DistributedDataParallel(net)
matrices = [p for p in net.parameters() if p.ndim == 2]
rest = [p for p in net.parameters() if p.ndim == 1]
groups = [{"params": matrices, "lr": 0.2 / SCALE**2}, {"params": rest, "lr": 0.2}]
optimizer = torch.optim.SGD(groups, momentum=0.9)
for step in range(1, 6):
    x = torch.randn(16, 9, generator=torch.Generator().manual_seed(step))
    classes = (x[:, :3] + x[:, 3:6] * x[:, 6:]).argmax(1)
    loss = F.cross_entropy(model(x.chunk(world)[rank]), classes.chunk(world)[rank])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    shown = loss.detach() / world
    if world > 1:
        dist.all_reduce(shown)
    if rank == 0:
        print(f"step {step} loss {shown.item():.7f}", flush=True)
if "--save" in sys.argv:
    torch.save(
        {n: p.detach() * (SCALE if p.ndim == 2 else 1) for n, p in net.named_parameters()},
        os.path.join(sys.argv[sys.argv.index("--save") + 1], f"rank{rank}.pt"),
    )
if world > 1:
    dist.destroy_process_group()
