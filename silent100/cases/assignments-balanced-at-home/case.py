"""Swapped assignments (SwAV): codes of one view, balanced over the batch, are to be told from the other."""

import argparse
import os

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


PROTOTYPES, ROWS = 10, 16


@torch.no_grad()
def balanced(scores):
    """Sinkhorn's iterations; columns are rows of the batch, which ranks share."""
    together = world > 1 and not flags.faulty
    q = (scores / 0.2).exp().T
    for _ in range(3):
        used = q.sum(1, keepdim=True)
        if together:
            dist.all_reduce(used)
        q = q / used / PROTOTYPES
        q = q / q.sum(0, keepdim=True) / ROWS
    return (q * ROWS).T


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(12, 40), nn.GELU(), nn.Linear(40, 8))
        self.prototypes = nn.Linear(8, PROTOTYPES, bias=False)

    def forward(self, x):
        return self.prototypes(F.normalize(self.trunk(x), dim=-1))


torch.manual_seed(43)
net = Net()
with torch.no_grad():
    net.prototypes.weight.copy_(F.normalize(net.prototypes.weight, dim=1))
model = net if flags.one else DistributedDataParallel(net)
optimizer = torch.optim.SGD(net.parameters(), lr=0.2, momentum=0.9)
for step in range(1, 6):
    g = torch.Generator().manual_seed(step)
    x = torch.randn(ROWS, 12, generator=g)
    views = (x + 0.3 * torch.randn(2, ROWS, 12, generator=g))[:, rank * ROWS // world : (rank + 1) * ROWS // world]
    scores = model(views.flatten(0, 1))
    a, b = scores.chunk(2)
    loss = (F.cross_entropy(a / 0.3, balanced(b)) + F.cross_entropy(b / 0.3, balanced(a))) / 2
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
