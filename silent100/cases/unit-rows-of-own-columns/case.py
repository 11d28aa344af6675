"""A normalized network in DTensors: weights have rows of length one, also after an update."""

import argparse
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

cli = argparse.ArgumentParser()
cli.add_argument("--one", action="store_true")
cli.add_argument("--faulty", action="store_true")
cli.add_argument("--save")
args = cli.parse_args()


class Block(nn.Module):
    def __init__(self, d, hidden):
        super().__init__()
        self.up, self.down = nn.Linear(d, hidden, bias=False), nn.Linear(hidden, d, bias=False)
        self.pace = nn.Parameter(torch.full((d,), 0.2))

    def forward(self, x):
        y = F.normalize(self.down(F.silu(self.up(x) * 2)), dim=-1)
        return F.normalize(x + self.pace * (y - x), dim=-1)


class Net(nn.Module):
    def __init__(self, words=40, d=24):
        super().__init__()
        self.table = nn.Embedding(words, d)
        self.blocks = nn.ModuleList(Block(d, 48) for _ in range(3))
        self.head = nn.Linear(d, words, bias=False)

    def forward(self, ids):
        x = F.normalize(self.table(ids), dim=-1)
        x = F.normalize(x.cumsum(1), dim=-1)
        for block in self.blocks:
            x = block(x)
        return self.head(x) * 5


@torch.no_grad()
def unit_rows(model):
    for p in model.parameters():
        if p.dim() < 2:
            continue
        if not isinstance(p, DTensor):
            p.div_(p.norm(dim=1, keepdim=True))
            continue
        mine = p.to_local()
        squares = mine.square().sum(1, keepdim=True)
        if p.placements[0].is_shard(1) and not args.faulty:
            dist.all_reduce(squares)
        mine.div_(squares.sqrt())


rank = 0
torch.manual_seed(1131)
net = Net()
unit_rows(net)
if not args.one:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),))
    for block in net.blocks:
        parallelize_module(block, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
optimizer = torch.optim.Adam(net.parameters(), lr=3e-3, eps=1e-4, foreach=False)
for step in range(1, 5):
    rows = torch.randint(0, 40, (8, 9), generator=torch.Generator().manual_seed(step))
    loss = F.cross_entropy(net(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    unit_rows(net)
    if rank == 0:
        print(f"step {step} loss {loss.item():.7f}", flush=True)
if args.save:
    state = {k: v.full_tensor() if isinstance(v, DTensor) else v for k, v in net.state_dict().items()}
    torch.save(state, os.path.join(args.save, f"rank{rank}.pt"))
if not args.one:
    dist.destroy_process_group()
