"""Low-rank adapters on a model that FSDP2 has sharded already."""

import argparse
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

cli = argparse.ArgumentParser()
cli.add_argument("--one", action="store_true")
cli.add_argument("--faulty", action="store_true")
cli.add_argument("--save")
args = cli.parse_args()
rank, world = 0, 1
if not args.one:
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()


class Adapted(nn.Module):
    def __init__(self, base, r=3):
        super().__init__()
        self.base = base
        self.lora_down = nn.Parameter(torch.randn(r, base.in_features) * 0.3)
        self.lora_up = nn.Parameter(torch.zeros(base.out_features, r))

    def forward(self, x):
        return self.base(x) + x @ self.lora_down.T @ self.lora_up.T


class Block(nn.Module):
    def __init__(self, d=24):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(d), nn.Linear(d, 48), nn.Linear(48, d)

    def forward(self, x):
        return x + self.down(F.silu(self.up(self.norm(x))))


def average(parameters):
    """Averages what no wrapper takes care of."""
    for p in parameters:
        dist.all_reduce(p.grad)
        p.grad /= world


torch.manual_seed(1666)
model = nn.Sequential(nn.Embedding(45, 24), Block(), Block(), nn.Linear(24, 45)).requires_grad_(False)
if not args.one:
    for block in (model[1], model[2]):
        fully_shard(block)
    fully_shard(model)
torch.manual_seed(1667)
for block in (model[1], model[2]):
    block.up, block.down = Adapted(block.up), Adapted(block.down)
adapters = {n: p for n, p in model.named_parameters() if p.requires_grad}
optimizer = torch.optim.SGD(adapters.values(), lr=0.5)
for step in range(1, 6):
    rows = torch.randint(0, 45, (8, 11), generator=torch.Generator().manual_seed(step))[rank::world]
    loss = F.cross_entropy(model(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten())
    optimizer.zero_grad()
    loss.backward()
    if world > 1 and not args.faulty:
        average(p for p in adapters.values() if not isinstance(p, DTensor))
    optimizer.step()
    shown = loss.detach().clone()
    if world > 1:
        dist.all_reduce(shown)
    if rank == 0:
        print(f"step {step} loss {shown.item() / world:.7f}", flush=True)
if args.save:
    torch.save({n: p.detach() for n, p in adapters.items()}, os.path.join(args.save, f"rank{rank}.pt"))
if world > 1:
    dist.destroy_process_group()
