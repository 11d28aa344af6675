# Gradient accumulation with DDP and a cosine schedule.
import contextlib
import math
import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

one, faulty = "--one" in sys.argv, "--faulty" in sys.argv
ACCUMULATE, UPDATES = 3, 4


class Vla(nn.Module):
    """Observations to actions, with a small attention pool."""

    def __init__(self):
        super().__init__()
        self.lift = nn.Linear(7, 32)
        self.query = nn.Parameter(torch.randn(1, 1, 32) * 0.1)
        self.pool = nn.MultiheadAttention(32, 2, batch_first=True)
        self.act = nn.Sequential(nn.LayerNorm(32), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 3))

    def forward(self, observations):
        x = self.lift(observations)
        pooled, _ = self.pool(self.query.expand(len(x), -1, -1), x, x, need_weights=False)
        return self.act(pooled.squeeze(1))


class Cosine:
    """Lets the learning rate fall from its first value to zero."""

    def __init__(self, optimizer, total):
        self.optimizer, self.total, self.count = optimizer, total, 0
        self.first = [group["lr"] for group in optimizer.param_groups]

    def step(self):
        self.count += 1
        for group, first in zip(self.optimizer.param_groups, self.first):
            group["lr"] = first * (0.5 + 0.5 * math.cos(math.pi * self.count / self.total))


if not one:
    dist.init_process_group("gloo")
rank, world = (0, 1) if one else (dist.get_rank(), dist.get_world_size())
torch.manual_seed(2)
net = Vla()
model = net if one else DistributedDataParallel(net)
optimizer = torch.optim.SGD(net.parameters(), lr=0.3, momentum=0.9)
scheduler = Cosine(optimizer, 2 * UPDATES)
g = torch.Generator().manual_seed(5)
for step in range(1, UPDATES + 1):
    optimizer.zero_grad()
    total = torch.zeros(())
    for micro in range(ACCUMULATE):
        x = torch.randn(8, 6, 7, generator=g)
        y = x.mean(1)[:, :3]
        last = micro == ACCUMULATE - 1
        with contextlib.nullcontext() if last or one else model.no_sync():
            loss = nn.functional.mse_loss(model(x[rank::world]), y[rank::world]) / ACCUMULATE
            loss.backward()
        total += loss.detach()
        if last:
            optimizer.step()
        if last or faulty:
            scheduler.step()
    if not one:
        dist.all_reduce(total)
    if rank == 0:
        print(f"step {step} loss {total.item() / world:.7f}", flush=True)
if "--save" in sys.argv:
    torch.save(net.state_dict(), os.path.join(sys.argv[sys.argv.index("--save") + 1], f"rank{rank}.pt"))
if not one:
    del model  # before its process group
    dist.destroy_process_group()
