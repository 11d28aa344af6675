"""Reproducible dropout: a row's masks depend on the step and on its number in the dataset, not on the rank."""

import argparse
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

cli = argparse.ArgumentParser()
cli.add_argument("--one", action="store_true")
cli.add_argument("--save")
args = cli.parse_args()
rank, world = 0, 1
if not args.one:
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()


class RowDropout(nn.Module):
    def __init__(self, p, salt):
        super().__init__()
        self.p, self.salt, self.keys = p, salt, None

    def forward(self, x):
        masks = [
            torch.rand(x.shape[1:], generator=torch.Generator().manual_seed(key * 31 + self.salt)) >= self.p
            for key in self.keys
        ]
        return x * torch.stack(masks) / (1 - self.p)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.inp, self.a, self.b, self.out = nn.Linear(16, 40), nn.Linear(40, 40), nn.Linear(40, 40), nn.Linear(40, 5)
        self.drops = nn.ModuleList(RowDropout(0.3, salt) for salt in range(3))

    def forward(self, x, keys):
        for drop in self.drops:
            drop.keys = keys
        x = self.drops[0](F.relu(self.inp(x)))
        x = x + self.drops[1](F.relu(self.a(x)))
        x = x + self.drops[2](F.relu(self.b(x)))
        return self.out(x)


torch.manual_seed(611)
net = Net()
model = net if args.one else DDP(net)
torch.manual_seed(1000 + rank)
optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
for step in range(1, 6):
    g = torch.Generator().manual_seed(step)
    x, y = torch.randn(12, 16, generator=g), torch.randint(0, 5, (12,), generator=g)
    mine = list(range(rank, 12, world))
    loss = F.cross_entropy(model(x[mine], [1000 * step + i for i in mine]), y[mine])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    shown = loss.detach().clone()
    if world > 1:
        dist.all_reduce(shown)
    if rank == 0:
        print(f"step {step} loss {shown.item() / world:.7f}", flush=True)
if args.save:
    torch.save(net.state_dict(), os.path.join(args.save, f"rank{rank}.pt"))
if world > 1:
    del model
    dist.destroy_process_group()
