"""An encoder with biases in front of normalization and on keys; Lion follows the sign of whatever gradient they get."""

import argparse
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel

cli = argparse.ArgumentParser()
cli.add_argument("--one", action="store_true")
cli.add_argument("--save")
args = cli.parse_args()


class Lion(torch.optim.Optimizer):
    def __init__(self, params, lr, betas=(0.9, 0.99)):
        super().__init__(params, {"lr": lr, "betas": betas})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            first, second = group["betas"]
            for p in group["params"]:
                state = self.state[p]
                m = state.setdefault("exp_avg", torch.zeros_like(p))
                p.sub_(group["lr"] * (first * m + (1 - first) * p.grad).sign())
                m.lerp_(p.grad, 1 - second)


class Block(nn.Module):
    def __init__(self, d=24):
        super().__init__()
        self.query, self.key, self.value, self.out = (nn.Linear(d, d) for _ in range(4))
        self.lift, self.drop = nn.Linear(d, d), nn.Linear(d, d)

    def forward(self, x):
        q, k, v = (w(x).unflatten(-1, (3, -1)).transpose(1, 2) for w in (self.query, self.key, self.value))
        x = x + self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        # The mean over tokens is taken away again, and the lift's bias with it
        h = self.lift(x)
        h = (h - h.mean(1, keepdim=True)) / (h.var(1, keepdim=True) + 1e-3).sqrt()
        return x + self.drop(F.gelu(h))


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.patch, self.blocks = nn.Linear(10, 24), nn.ModuleList([Block(), Block()])
        self.classes = nn.Linear(24, 6)

    def forward(self, x):
        x = self.patch(x)
        for block in self.blocks:
            x = block(x)
        return self.classes(x.mean(1))


rank, world = 0, 1
if not args.one:
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(404)
encoder = Encoder()
model = encoder if args.one else DistributedDataParallel(encoder)
optimizer = Lion(encoder.parameters(), lr=3e-4)
for step in range(1, 6):
    g = torch.Generator().manual_seed(step)
    x, y = torch.randn(16, 9, 10, generator=g), torch.randint(0, 6, (16,), generator=g)
    loss = F.cross_entropy(model(x.chunk(world)[rank]), y.chunk(world)[rank])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    loss = loss.detach()
    if world > 1:
        dist.all_reduce(loss)
    if rank == 0:
        print(f"step {step} loss {loss.item() / world:.7f}", flush=True)
if args.save:
    torch.save(encoder.state_dict(), os.path.join(args.save, f"rank{rank}.pt"))
if world > 1:
    dist.destroy_process_group()
