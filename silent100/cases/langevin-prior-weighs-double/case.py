"""Stochastic gradient Langevin dynamics over the weights of a small Bayesian network, under DDP."""

import math
import os
import sys

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel

ROWS, BATCH, SIGMA, PRIOR = 96, 16, 0.3, 0.2
alone = "--one" in sys.argv
rank, world = 0, 1
torch.manual_seed(6)
net = nn.Sequential(nn.Linear(3, 20), nn.Tanh(), nn.Linear(20, 20), nn.Tanh(), nn.Linear(20, 1))
model = net
if not alone:
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    model = DistributedDataParallel(net)
g = torch.Generator().manual_seed(1)
inputs = torch.rand(ROWS, 3, generator=g) * 4 - 2
targets = (inputs.prod(1, keepdim=True)).sin() + SIGMA * torch.randn(ROWS, 1, generator=g)

rate = 2e-5
for step in range(1, 7):
    batch = torch.randperm(ROWS, generator=torch.Generator().manual_seed(step))[:BATCH][rank::world]
    misfit = (model(inputs[batch]) - targets[batch]).square().sum() / (2 * SIGMA**2)
    seen = BATCH if "--faulty" in sys.argv else len(batch)
    prior = sum(p.square().sum() for p in net.parameters()) / (2 * PRIOR**2)
    energy = misfit * ROWS / seen + prior
    net.zero_grad()
    energy.backward()
    noise = torch.Generator().manual_seed(1000 + step)  # the same on all ranks
    with torch.no_grad():
        for p in net.parameters():
            p -= rate * p.grad
            p += math.sqrt(2 * rate) * torch.randn(p.shape, generator=noise)
    shown = misfit.detach() / BATCH
    if not alone:
        dist.all_reduce(shown)
    if rank == 0:
        print(f"step {step} loss {shown.item():.7f}", flush=True)
if "--save" in sys.argv:
    torch.save(net.state_dict(), os.path.join(sys.argv[sys.argv.index("--save") + 1], f"rank{rank}.pt"))
if not alone:
    dist.destroy_process_group()
