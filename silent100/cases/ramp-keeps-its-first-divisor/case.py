"""A ramp of the batch size: the number of accumulated microbatches of four rows grows as training goes on."""

import argparse
import os
from contextlib import nullcontext

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel

flags = argparse.ArgumentParser(description=__doc__)
flags.add_argument("--one", action="store_true")
flags.add_argument("--faulty", action="store_true")
flags.add_argument("--save")
flags = flags.parse_args()
rank, world = 0, 1
if not flags.one:
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()


PLAN = {1: 2, 3: 3, 5: 4}


class Ramp:
    def __init__(self, plan):
        self.plan, self.microbatches = plan, plan[1]
        self.divisor = self.microbatches * 2 // max(world, 1)

    def advance(self, step):
        if step in self.plan:
            self.microbatches = self.plan[step]
            if not flags.faulty:
                self.divisor = self.microbatches * 2 // world
        return self.microbatches


torch.manual_seed(14)
net = nn.Sequential(nn.Linear(9, 40), nn.SiLU(), nn.Linear(40, 40), nn.SiLU(), nn.Linear(40, 2))
model = net if world == 1 else DistributedDataParallel(net)
optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.8)
ramp, read = Ramp(PLAN), 0
for step in range(1, 7):
    count = ramp.advance(step) * 2
    g = torch.Generator().manual_seed(100 + step)
    x = torch.randn(4 * count, 9, generator=g)
    y = torch.stack([x[:, 0] * x[:, 1], x[:, 2:].sin().sum(1)], 1)
    mine = list(zip(x.split(4), y.split(4)))[rank::world]
    shown = torch.zeros(())
    for i, (a, b) in enumerate(mine):
        wait = world > 1 and i < len(mine) - 1
        with model.no_sync() if wait else nullcontext():
            error = F.mse_loss(model(a), b)
            (error / ramp.divisor).backward()
        shown += error.detach() / len(mine)
    optimizer.step()
    optimizer.zero_grad()
    if world > 1:
        dist.all_reduce(shown)
    if rank == 0:
        print(f"step {step} loss {shown.item() / world:.7f}", flush=True)
if flags.save:
    torch.save(net.state_dict(), os.path.join(flags.save, f"rank{rank}.pt"))
if world > 1:
    dist.destroy_process_group()
