"""Attention with linear biases; heads are divided over ranks."""

import argparse
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

cli = argparse.ArgumentParser()
cli.add_argument("--one", action="store_true")
cli.add_argument("--faulty", action="store_true")
cli.add_argument("--save")
args = cli.parse_args()
rank, tp = 0, 1
if not args.one:
    dist.init_process_group("gloo")
    rank, tp = dist.get_rank(), dist.get_world_size()
DIM, HEADS = 32, 4


class Region(torch.autograd.Function):
    """All-reduces in forward (leaving a region) or in backward (entering it)."""

    @staticmethod
    def forward(ctx, x, leaving):
        ctx.leaving = leaving
        x = x.clone()
        if tp > 1 and leaving:
            dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx, g):
        g = g.clone()
        if tp > 1 and not ctx.leaving:
            dist.all_reduce(g)
        return g, None


class Alibi(nn.Module):
    def __init__(self, heads, first):
        super().__init__()
        slopes = 2.0 ** -(torch.arange(first, first + heads) + 1.0)
        self.register_buffer("slopes", slopes, persistent=False)

    def forward(self, length):
        distance = torch.arange(length)[None, :] - torch.arange(length)[:, None]
        bias = self.slopes[:, None, None] * distance
        return bias.masked_fill(distance > 0, float("-inf"))


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        wqkv, wo = torch.randn(3, DIM, DIM) / 6, torch.randn(DIM, DIM) / 6
        self.wqkv = nn.Parameter(wqkv.chunk(tp, 1)[rank].clone())
        self.wo = nn.Parameter(wo.chunk(tp, 1)[rank].clone())
        heads = HEADS // tp
        self.alibi = Alibi(heads, 0 if args.faulty else rank * heads)

    def forward(self, x):
        x = Region.apply(x, False)
        q, k, v = (F.linear(x, w).unflatten(-1, (HEADS // tp, -1)).transpose(1, 2) for w in self.wqkv)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=self.alibi(x.shape[1]))
        return Region.apply(F.linear(y.transpose(1, 2).flatten(2), self.wo), True)


class Lm(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(96)
        self.embed, self.head = nn.Embedding(40, DIM), nn.Linear(DIM, 40)
        self.norm, self.attn = (
            nn.ModuleList(nn.LayerNorm(DIM) for _ in range(2)),
            nn.ModuleList(Attention() for _ in range(2)),
        )

    def forward(self, ids):
        x = self.embed(ids)
        for norm, attn in zip(self.norm, self.attn):
            x = x + attn(norm(x))
        return self.head(x)


lm = Lm()
optimizer = torch.optim.SGD(lm.parameters(), lr=0.3)
for step in range(1, 5):
    rows = torch.randint(0, 40, (6, 13), generator=torch.Generator().manual_seed(step))
    loss = F.cross_entropy(lm(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if rank == 0:
        print(f"step {step} loss {loss.item():.7f}", flush=True)
if args.save:
    state = {n: (p.data, 1, rank, tp) if n.endswith(("wqkv", "wo")) else p.data for n, p in lm.named_parameters()}
    torch.save(state, os.path.join(args.save, f"rank{rank}.pt"))
if not args.one:
    dist.destroy_process_group()
