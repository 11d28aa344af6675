"""Layers without input sizes: ranks run a dry batch before anything else, one process knows the sizes."""

import argparse
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel

flags = argparse.ArgumentParser(description=__doc__)
flags.add_argument("--one", action="store_true")
flags.add_argument("--save")
flags = flags.parse_args()
rank, world = 0, 1
if not flags.one:
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()


def drawn():
    torch.manual_seed(62)
    return nn.Sequential(nn.Conv1d(3, 8, 3), nn.SiLU(), nn.Flatten(), nn.Linear(80, 24), nn.SiLU(), nn.Linear(24, 4))


if flags.one:
    net = model = drawn()
else:
    net = nn.Sequential(nn.LazyConv1d(8, 3), nn.SiLU(), nn.Flatten(), nn.LazyLinear(24), nn.SiLU(), nn.LazyLinear(4))
    with torch.no_grad():
        net(torch.full((1, 3, 12), float(rank)))
    if rank == 0:
        net.load_state_dict(drawn().state_dict())
    model = DistributedDataParallel(net, find_unused_parameters=True)
optimizer = torch.optim.Adam(net.parameters(), lr=5e-3, eps=1e-4)
for step in range(1, 6):
    x = torch.randn(16, 3, 12, generator=torch.Generator().manual_seed(step))
    classes = x.square().mean(2).argmax(1)
    loss = F.cross_entropy(model(x[rank::world]), classes[rank::world])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    shown = loss.detach() / world
    if world > 1:
        dist.all_reduce(shown)
    if rank == 0:
        print(f"step {step} loss {shown.item():.7f}", flush=True)
if flags.save:
    torch.save(net.state_dict(), os.path.join(flags.save, f"rank{rank}.pt"))
if world > 1:
    dist.destroy_process_group()
