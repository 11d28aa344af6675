"""Three different towers vote; every rank runs one of them on all rows and knows the others' logits."""

import argparse
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

flags = argparse.ArgumentParser(description=__doc__)
flags.add_argument("--one", action="store_true")
flags.add_argument("--save")
flags = flags.parse_args()
rank, world = 0, 1
if not flags.one:
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()


class Votes(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        x = x.clone()
        if world > 1:
            dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx, g):
        return g


def towers():
    torch.manual_seed(97)
    yield "wide", nn.Sequential(nn.Linear(12, 64), nn.ReLU(), nn.Linear(64, 4))
    yield "deep", nn.Sequential(nn.Linear(12, 20), nn.Tanh(), nn.Linear(20, 20), nn.Tanh(), nn.Linear(20, 4))
    yield "plain", nn.Linear(12, 4)


model = nn.ModuleDict({name: t for i, (name, t) in enumerate(towers()) if world == 1 or i == rank})
rates = {"wide": 0.1, "deep": 0.2, "plain": 0.05}
optimizer = torch.optim.SGD([{"params": t.parameters(), "lr": rates[n]} for n, t in model.items()], momentum=0.9)
for step in range(1, 6):
    x = torch.randn(16, 12, generator=torch.Generator().manual_seed(step))
    logits = Votes.apply(sum(tower(x) for tower in model.values()))
    loss = F.cross_entropy(logits, (x[:, :4] * x[:, 4:8] + x[:, 8:]).argmax(1))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if rank == 0:
        print(f"step {step} loss {loss.item():.7f}", flush=True)
if flags.save:
    torch.save(model.state_dict(), os.path.join(flags.save, f"rank{rank}.pt"))
if world > 1:
    dist.destroy_process_group()
