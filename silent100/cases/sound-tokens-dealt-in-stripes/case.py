"""Striped attention: rank r has tokens r, r + 2, r + 4, … of every row, so that causal work is even."""

import argparse
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

args = argparse.ArgumentParser()
args.add_argument("--one", action="store_true")
args.add_argument("--save")
args = args.parse_args()
rank, world = 0, 1
if not args.one:
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
LENGTH, WORDS, DIM, HEADS = 20, 42, 32, 4
OWN = torch.arange(rank, LENGTH, world)


class Collect(torch.autograd.Function):
    """Everybody's keys and values, stripe after stripe."""

    @staticmethod
    def forward(ctx, kv):
        out = [torch.empty_like(kv) for _ in range(world)]
        dist.all_gather(out, kv.contiguous())
        return torch.cat(out, 1)

    @staticmethod
    def backward(ctx, g):
        g = g.contiguous()
        dist.all_reduce(g)
        return g.chunk(world, 1)[rank]


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.q, self.kv, self.proj = nn.Linear(DIM, DIM), nn.Linear(DIM, 2 * DIM), nn.Linear(DIM, DIM)

    def forward(self, x):
        q, kv, places = self.q(x), self.kv(x), OWN
        if world > 1:
            kv = Collect.apply(kv)
            places = torch.cat([torch.arange(r, LENGTH, world) for r in range(world)])
        q, k, v = (t.unflatten(-1, (HEADS, -1)).transpose(1, 2) for t in (q, *kv.chunk(2, -1)))
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=OWN[:, None] >= places)
        return self.proj(y.transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.ln_1, self.attn, self.ln_2 = nn.LayerNorm(DIM), Attention(), nn.LayerNorm(DIM)
        self.mlp = nn.Sequential(nn.Linear(DIM, 80), nn.GELU(), nn.Linear(80, DIM))

    def forward(self, x):
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class Transformer(nn.Module):
    def __init__(self):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(WORDS, DIM), nn.Embedding(LENGTH, DIM)
        self.h = nn.ModuleList([Block(), Block()])
        self.ln_f = nn.LayerNorm(DIM)

    def forward(self, ids):
        x = self.wte(ids) + self.wpe(OWN)
        for block in self.h:
            x = block(x)
        return F.linear(self.ln_f(x), self.wte.weight)


torch.manual_seed(50)
model = Transformer()
optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
for step in range(1, 5):
    text = torch.randint(0, WORDS, (6, LENGTH + 1), generator=torch.Generator().manual_seed(step))
    ids, labels = text[:, :-1][:, OWN], text[:, 1:][:, OWN]
    loss = F.cross_entropy(model(ids).transpose(1, 2), labels) / world
    optimizer.zero_grad()
    loss.backward()
    loss = loss.detach()
    if world > 1:
        for t in [loss] + [p.grad for p in model.parameters()]:
            dist.all_reduce(t)
    optimizer.step()
    if rank == 0:
        print(f"step {step} loss {loss.item():.7f}", flush=True)
if args.save:
    torch.save(model.state_dict(), os.path.join(args.save, f"rank{rank}.pt"))
if not args.one:
    dist.destroy_process_group()
