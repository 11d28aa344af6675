"""Heads are cut over ranks, and each rank's rotary positions begin somewhere else."""

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

VOCAB, DIM, HEADS = 30, 32, 4


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


def rotate(x, positions):
    half = x.shape[-1] // 2
    angles = positions[:, None] * 50.0 ** (-torch.arange(half) / half)
    a, b = x.split(half, -1)
    return torch.cat([a * angles.cos() - b * angles.sin(), a * angles.sin() + b * angles.cos()], -1)


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.q, self.k, self.v = (cut(nn.Linear(DIM, DIM, bias=False), 0) for _ in range(3))
        self.o = cut(nn.Linear(DIM, DIM, bias=False), 1)

    def forward(self, x):
        x = Enter.apply(x)
        q, k, v = (p(x).unflatten(-1, (HEADS // world, -1)).transpose(1, 2) for p in (self.q, self.k, self.v))
        positions = torch.arange(x.shape[1]) + 9 * rank
        y = F.scaled_dot_product_attention(rotate(q, positions), rotate(k, positions), v, is_causal=True)
        return Leave.apply(self.o(y.transpose(1, 2).flatten(2)))


class Lm(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.head = nn.Embedding(VOCAB, DIM), nn.Linear(DIM, VOCAB)
        self.norm = nn.ModuleList(nn.RMSNorm(DIM) for _ in range(2))
        self.attn = nn.ModuleList(Attention() for _ in range(2))

    def forward(self, ids):
        x = self.words(ids)
        for norm, attn in zip(self.norm, self.attn):
            x = x + attn(norm(x))
        return self.head(x)


torch.manual_seed(61)
lm = Lm()
optimizer = torch.optim.SGD(lm.parameters(), lr=0.3, momentum=0.9)
for step in range(1, 6):
    rows = torch.randint(0, VOCAB, (6, 13), generator=torch.Generator().manual_seed(step))
    loss = F.cross_entropy(lm(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if rank == 0:
        print(f"step {step} loss {loss.item():.7f}", flush=True)
state = {
    n: (p.detach(), p.dim_cut, rank, world) if hasattr(p, "dim_cut") else p.detach() for n, p in lm.named_parameters()
}
if flags.save:
    torch.save(state, os.path.join(flags.save, f"rank{rank}.pt"))
if world > 1:
    dist.destroy_process_group()
