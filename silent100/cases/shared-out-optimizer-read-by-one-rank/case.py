"""ZeroRedundancyOptimizer under DDP: collected on rank 0 after three steps, read again by a new job."""

import argparse
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

parser = argparse.ArgumentParser()
parser.add_argument("--one", action="store_true")
parser.add_argument("--faulty", action="store_true")
parser.add_argument("--save")
args = parser.parse_args()
OPTIONS = {"lr": 0.03, "eps": 1e-2}


class Digits(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(1, 12, 3, 2, 1)
        self.wide = nn.Linear(12 * 16, 20, bias=False)
        self.last = nn.Linear(20, 10)

    def forward(self, x):
        return self.last(torch.selu(self.wide(torch.selu(self.conv(x)).flatten(1))))


class Job:
    def __init__(self, rank, world):
        torch.manual_seed(30)
        self.rank, self.world, self.net = rank, world, Digits()
        if world > 1:
            self.model = DistributedDataParallel(self.net)
            self.optimizer = ZeroRedundancyOptimizer(self.net.parameters(), torch.optim.Adagrad, **OPTIONS)
        else:
            self.model, self.optimizer = self.net, torch.optim.Adagrad(self.net.parameters(), **OPTIONS)

    def update(self, step):
        g = torch.Generator().manual_seed(step)
        x, y = torch.randn(8, 1, 8, 8, generator=g), torch.randint(0, 10, (8,), generator=g)
        loss = F.cross_entropy(self.model(x[self.rank :: self.world]), y[self.rank :: self.world])
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        loss = loss.detach() / self.world
        if self.world > 1:
            dist.all_reduce(loss)
        if self.rank == 0:
            print(f"step {step} loss {loss.item():.7f}", flush=True)

    def checkpoint(self):
        if self.world == 1:
            return self.net.state_dict(), self.optimizer.state_dict()
        self.optimizer.consolidate_state_dict(to=0)
        box = [None]
        if self.rank == 0:
            box = [(self.net.state_dict(), self.optimizer.state_dict())]
        dist.broadcast_object_list(box, 0)  # stands for a file that everybody can read
        return box[0]

    def resume(self, weights, moments):
        self.net.load_state_dict(weights)
        if self.rank == 0 or not args.faulty:
            self.optimizer.load_state_dict(moments)


rank, world = 0, 1
if not args.one:
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
job = Job(rank, world)
for step in range(1, 4):
    job.update(step)
file = job.checkpoint()
job = Job(rank, world)
job.resume(*file)
for step in range(4, 7):
    job.update(step)
if args.save:
    torch.save(job.net.state_dict(), os.path.join(args.save, f"rank{rank}.pt"))
if world > 1:
    dist.destroy_process_group()
