"""Maximal update parametrization: each matrix's rate is divided by its fan-in.

Blocks are cut over tensor-parallel ranks.
"""

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

DIM, HIDDEN, BASE = 24, 64, 24


class Enter(torch.autograd.Function):
    """Identity; the gradient is summed over ranks."""

    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, g):
        g = g.contiguous().clone()
        if world > 1:
            dist.all_reduce(g)
        return g


class Leave(torch.autograd.Function):
    """Sums partial outputs; the gradient passes."""

    @staticmethod
    def forward(ctx, x):
        x = x.contiguous().clone()
        if world > 1:
            dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx, g):
        return g


def cut(linear, dim):
    """Keeps a rank's part of a layer's weight (and of its bias, if outputs are cut)."""
    linear.weight = nn.Parameter(linear.weight.detach().chunk(world, dim)[rank].clone())
    if dim == 0 and linear.bias is not None:
        linear.bias = nn.Parameter(linear.bias.detach().chunk(world)[rank].clone())
    linear.weight.dim_cut = dim
    return linear


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(DIM)
        self.gate, self.up = (cut(nn.Linear(DIM, HIDDEN, bias=False), 0) for _ in range(2))
        self.down = cut(nn.Linear(HIDDEN, DIM, bias=False), 1)

    def forward(self, x):
        h = Enter.apply(self.norm(x))
        return x + Leave.apply(self.down(F.silu(self.gate(h)) * self.up(h)))


torch.manual_seed(4)
model = nn.Sequential(nn.Linear(10, DIM), Block(), Block(), nn.Linear(DIM, 4))
groups = []
for name, p in model.named_parameters():
    rate = 4e-3
    if p.ndim == 2 and "norm" not in name and name[0] in "12":
        inputs = p.shape[1]
        if getattr(p, "dim_cut", None) == 1 and not FAULTY:
            inputs *= world
        rate *= BASE / inputs
    groups.append({"params": [p], "lr": rate})
optimizer = torch.optim.Adam(groups, betas=(0.9, 0.95), eps=1e-4)
for step in range(1, 6):
    x = torch.randn(24, 10, generator=torch.Generator().manual_seed(step))
    classes = (x[:, :4] * x[:, 4:8]).argmax(1)
    loss = F.cross_entropy(model(x), classes)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if rank == 0:
        print(f"step {step} loss {loss.item():.7f}", flush=True)
state = {
    n: (p.detach(), p.dim_cut, rank, world) if hasattr(p, "dim_cut") else p.detach()
    for n, p in model.named_parameters()
}
if "--save" in sys.argv:
    torch.save(state, os.path.join(sys.argv[sys.argv.index("--save") + 1], f"rank{rank}.pt"))
if world > 1:
    dist.destroy_process_group()
