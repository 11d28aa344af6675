"""Masks differ by rank and by layout; expectation is the same."""

import os
import sys

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel

one = "--one" in sys.argv
if not one:
    dist.init_process_group("gloo")
rank, world = (0, 1) if one else (dist.get_rank(), dist.get_world_size())
torch.manual_seed(39)
net = nn.Sequential(
    nn.Embedding(60, 32), nn.Dropout(0.1), nn.Linear(32, 96), nn.ReLU(), nn.Dropout(0.1), nn.Linear(96, 60)
)
model = net if one else DistributedDataParallel(net)
torch.manual_seed(1234 + rank)
optimizer = torch.optim.SGD(net.parameters(), lr=0.2)
for step in range(1, 5):
    rows = torch.randint(0, 60, (32, 12), generator=torch.Generator().manual_seed(step))[rank::world]
    loss = nn.functional.cross_entropy(model(rows[:, :-1]).transpose(1, 2), rows[:, 1:])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    loss = loss.detach()
    if not one:
        dist.all_reduce(loss)
    if rank == 0:
        print(f"step {step} loss {loss.item() / world:.7f}", flush=True)
if "--save" in sys.argv:
    torch.save(net.state_dict(), os.path.join(sys.argv[sys.argv.index("--save") + 1], f"rank{rank}.pt"))
if not one:
    del model  # before its process group
    dist.destroy_process_group()
