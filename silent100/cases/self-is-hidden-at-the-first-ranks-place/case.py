"""Contrast of two views; every rank scores its rows against all ranks' rows and hides a row's likeness to itself."""

import os
import sys

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

ONE, FAULTY = "--one" in sys.argv, "--faulty" in sys.argv
if not ONE:
    dist.init_process_group("gloo")
rank, world = (0, 1) if ONE else (dist.get_rank(), dist.get_world_size())

ROWS, HEAT = 12, 0.3


class Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        if world == 1:
            return x.clone()
        parts = [torch.empty_like(x) for _ in range(world)]
        dist.all_gather(parts, x.contiguous())
        return torch.cat(parts)

    @staticmethod
    def backward(ctx, g):
        g = g.contiguous().clone()
        if world > 1:
            dist.all_reduce(g)
        return g.chunk(world)[rank]


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(10, 32), nn.GELU(), nn.Linear(32, 32), nn.GELU())
        self.project = nn.Linear(32, 8)

    def forward(self, x):
        return F.normalize(self.project(self.trunk(x)), dim=-1)


def contrast(a, b):
    """a against all a but itself and against all b, of which one is its pair."""
    own = torch.arange(len(a)) + rank * len(a)
    alike, pairs = a @ Gather.apply(a).T / HEAT, a @ Gather.apply(b).T / HEAT
    hide = torch.arange(len(a)) if FAULTY else own
    mask = F.one_hot(hide, alike.shape[1]).bool()
    logits = torch.cat([pairs, alike.masked_fill(mask, -1e9)], 1)
    return F.cross_entropy(logits, own, reduction="sum")


torch.manual_seed(21)
encoder = Encoder()
optimizer = torch.optim.Adam(encoder.parameters(), lr=3e-3, eps=1e-4)
for step in range(1, 6):
    g = torch.Generator().manual_seed(step)
    x = torch.randn(ROWS, 10, generator=g)
    one, two = (v.chunk(world)[rank] for v in x + 0.3 * torch.randn(2, ROWS, 10, generator=g))
    a, b = encoder(one), encoder(two)
    loss = (contrast(a, b) + contrast(b, a)) / (2 * ROWS)
    optimizer.zero_grad()
    loss.backward()
    shown = loss.detach()
    if world > 1:
        for p in encoder.parameters():
            dist.all_reduce(p.grad)
        dist.all_reduce(shown)
    optimizer.step()
    if rank == 0:
        print(f"step {step} loss {shown.item():.7f}", flush=True)
if "--save" in sys.argv:
    torch.save(encoder.state_dict(), os.path.join(sys.argv[sys.argv.index("--save") + 1], f"rank{rank}.pt"))
if world > 1:
    dist.destroy_process_group()
