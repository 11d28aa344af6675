"""Centred gradients (each output's gradient sums to zero over its inputs) with feed-forward blocks cut over ranks."""

import argparse
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

flags = argparse.ArgumentParser(description=__doc__)
flags.add_argument("--one", action="store_true")
flags.add_argument("--faulty", action="store_true")
flags.add_argument("--save")
flags = flags.parse_args()
rank, world = 0, 1
if not flags.one:
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()

DIM, HIDDEN = 20, 56


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
        self.ln, self.wide = nn.LayerNorm(DIM), cut(nn.Linear(DIM, HIDDEN), 0)
        self.back = cut(nn.Linear(HIDDEN, DIM, bias=False), 1)

    def forward(self, x):
        return x + Leave.apply(self.back(torch.relu(self.wide(Enter.apply(self.ln(x))))))


class Centred(torch.optim.SGD):
    @torch.no_grad()
    def step(self):
        for p in self.param_groups[0]["params"]:
            if p.ndim > 1:
                mean = p.grad.mean(1, keepdim=True)
                if world > 1 and getattr(p, "dim_cut", 0) == 1 and not flags.faulty:
                    dist.all_reduce(mean)
                    mean /= world
                p.grad -= mean
        super().step()


torch.manual_seed(28)
model = nn.Sequential(nn.Linear(9, DIM), Block(), Block(), nn.Linear(DIM, 3))
optimizer = Centred(model.parameters(), lr=0.1, momentum=0.9)
for step in range(1, 6):
    x = torch.randn(20, 9, generator=torch.Generator().manual_seed(step))
    loss = F.cross_entropy(model(x), (x[:, :3] + x[:, 3:6].abs()).argmax(1))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if rank == 0:
        print(f"step {step} loss {loss.item():.7f}", flush=True)
state = {
    n: (p.detach(), p.dim_cut, rank, world) if hasattr(p, "dim_cut") else p.detach()
    for n, p in model.named_parameters()
}
for n in list(state):
    if n.endswith("wide.bias"):
        state[n] = (state[n], 0, rank, world)
if flags.save:
    torch.save(state, os.path.join(flags.save, f"rank{rank}.pt"))
if world > 1:
    dist.destroy_process_group()
