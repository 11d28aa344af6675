"""A cosine schedule over the whole training; its length is epochs times batches of the loader."""

import argparse
import math
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

flags = argparse.ArgumentParser(description=__doc__)
flags.add_argument("--one", action="store_true")
flags.add_argument("--faulty", action="store_true")
flags.add_argument("--save")
flags = flags.parse_args()
rank, world = 0, 1
if not flags.one:
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()


EPOCHS, BATCH = 2, 8
g = torch.Generator().manual_seed(0)
x = torch.randn(24, 8, generator=g)
rows = TensorDataset(x, (x[:, :4] * x[:, 4:]).argmax(1))
loader = DataLoader(rows, BATCH // world)
batches = len(loader) if flags.faulty else None
if world > 1:
    loader = DataLoader(rows, BATCH // world, sampler=DistributedSampler(rows, world, rank, shuffle=False))
total = EPOCHS * (batches or len(loader))
torch.manual_seed(1)
net = nn.Sequential(nn.Linear(8, 32), nn.SiLU(), nn.Linear(32, 32), nn.SiLU(), nn.Linear(32, 4))
model = net if world == 1 else DistributedDataParallel(net)
optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2, eps=1e-3)
schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda i: 0.55 + 0.45 * math.cos(math.pi * min(i / total, 1)))
step = 0
for _epoch in range(EPOCHS):
    for inputs, classes in loader:
        step += 1
        loss = F.cross_entropy(model(inputs), classes)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        shown = loss.detach() / world
        if world > 1:
            dist.all_reduce(shown)
        if rank == 0:
            print(f"step {step} loss {shown.item():.7f}", flush=True)
if flags.save:
    torch.save(net.state_dict(), os.path.join(flags.save, f"rank{rank}.pt"))
if world > 1:
    dist.destroy_process_group()
