"""Factors of a matrix of ratings as DTensors: rows of users on their ranks, items everywhere."""

import os
import sys

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

ONE = "--one" in sys.argv
rank = 0
if not ONE:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))


def place(tensor, how):
    return tensor if ONE else distribute_tensor(tensor, mesh, [how])


class Factors(nn.Module):
    def __init__(self):
        super().__init__()
        self.users = nn.Parameter(place(torch.randn(14, 5) * 0.6, Shard(0)))
        self.items = nn.Parameter(place(torch.randn(11, 5) * 0.6, Replicate()))

    def forward(self, ratings):
        guess = self.users @ self.items.T
        return ((guess - ratings) ** 2).sum() / 154 + 0.01 * (self.users**2).sum() + 0.01 * (self.items**2).sum()


torch.manual_seed(92)
model = Factors()
g = torch.Generator().manual_seed(4)
tastes = torch.randn(14, 3, generator=g) @ torch.randn(3, 11, generator=g)
velocity = {n: torch.zeros_like(p) for n, p in model.named_parameters()}
for step in range(1, 8):
    noise = 0.1 * torch.randn(14, 11, generator=torch.Generator().manual_seed(step))
    loss = model(place(tastes + noise, Shard(0)))
    if not ONE:
        loss = loss.full_tensor()
    model.zero_grad()
    loss.backward()
    with torch.no_grad():
        for name, p in model.named_parameters():
            grad = p.grad if ONE else p.grad.redistribute(placements=p.placements)
            velocity[name] = 0.8 * velocity[name] + grad
            p -= 0.5 * velocity[name]
    if rank == 0:
        print(f"step {step} loss {loss.item():.7f}", flush=True)
if "--save" in sys.argv:
    state = {n: p.detach() if ONE else p.detach().full_tensor() for n, p in model.named_parameters()}
    torch.save(state, os.path.join(sys.argv[sys.argv.index("--save") + 1], f"rank{rank}.pt"))
if not ONE:
    dist.destroy_process_group()
