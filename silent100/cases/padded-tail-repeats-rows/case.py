# One epoch over a dataset whose length is odd; the loss is a mean over the rows that a step really has.
import os
import sys

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DistributedSampler

one, faulty = "--one" in sys.argv, "--faulty" in sys.argv
ROWS, BATCH = 27, 8


def dataset():
    gen = torch.Generator().manual_seed(12)
    return torch.randn(ROWS, 14, generator=gen), torch.randn(ROWS, 3, generator=gen)


def indices(rank, world):
    if one:
        return list(range(ROWS))
    if faulty:
        return list(DistributedSampler(range(ROWS), world, rank, shuffle=False, drop_last=False))
    return list(range(ROWS))[rank::world]


class Regressor(nn.Module):
    def __init__(self):
        super().__init__()
        self.inp = nn.Linear(14, 40)
        self.mid = nn.ModuleList([nn.Linear(40, 40) for _ in range(3)])
        self.out = nn.Linear(40, 3)

    def forward(self, x):
        x = torch.relu(self.inp(x))
        for m in self.mid:
            x = x + torch.tanh(m(x))
        return self.out(x)


if not one:
    dist.init_process_group("gloo")
rank = 0 if one else dist.get_rank()
world = 1 if one else dist.get_world_size()
torch.manual_seed(1)
model = Regressor()
optimizer = torch.optim.Adam(model.parameters(), lr=2e-3, eps=1e-6)
x, y = dataset()
mine = indices(rank, world)
each = BATCH // world
steps = -(-ROWS // BATCH)
for step in range(steps):
    chosen = mine[step * each : (step + 1) * each]
    count = torch.tensor(len(chosen))
    if not one:
        dist.all_reduce(count)
    error = F.mse_loss(model(x[chosen]), y[chosen], reduction="sum") / count
    error.backward()
    if not one:
        for p in model.parameters():
            dist.all_reduce(p.grad)
    optimizer.step()
    optimizer.zero_grad()
    error = error.detach()
    if not one:
        dist.all_reduce(error)
    if rank == 0:
        print(f"step {step + 1} loss {error.item():.7f}", flush=True)
if "--save" in sys.argv:
    torch.save(model.state_dict(), os.path.join(sys.argv[sys.argv.index("--save") + 1], f"rank{rank}.pt"))
if not one:
    dist.destroy_process_group()
