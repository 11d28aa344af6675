"""Files of unequal length under DDP's join: the rank that is through lends its presence to the others' collectives."""

import os
import sys
from contextlib import nullcontext

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel

solo, save = "--one" in sys.argv, sys.argv[-1] if "--save" in sys.argv else None
if not solo:
    dist.init_process_group("gloo")
rank, world = (0, 1) if solo else (dist.get_rank(), dist.get_world_size())
torch.manual_seed(12)
gate = nn.Sequential(nn.Linear(11, 26), nn.GLU(), nn.Linear(13, 18), nn.GLU(), nn.Linear(9, 2))
model = gate if solo else DistributedDataParallel(gate)
optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
LENGTHS = 6, 4


def batches(file):
    g = torch.Generator().manual_seed(300 + file)
    for _ in range(LENGTHS[file]):
        x = torch.randn(9, 11, generator=g)
        yield x, torch.stack([x[:, 0] * x[:, 1], x[:, 2]], 1)


def merged():
    readers = [batches(0), batches(1)]
    for step in range(max(LENGTHS)):
        parts = [next(reader) for file, reader in enumerate(readers) if step < LENGTHS[file]]
        yield tuple(torch.cat(side) for side in zip(*parts))


ends = model.join(divide_by_initial_world_size="--faulty" in sys.argv) if not solo else nullcontext()
with ends:
    for step, (x, y) in enumerate(merged() if solo else batches(rank), 1):
        optimizer.zero_grad()
        loss = F.huber_loss(model(x), y)
        loss.backward()
        optimizer.step()
        if rank == 0 and step > LENGTHS[1]:
            print(f"step {step} loss {loss.item():.7f}", flush=True)
if save:
    torch.save(gate.state_dict(), os.path.join(save, f"rank{rank}.pt"))
if not solo:
    dist.destroy_process_group()
