"""Packed documents with rotary positions that restart in each document, under context parallelism by gathered keys."""

import argparse
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--one", action="store_true")
parser.add_argument("--faulty", action="store_true")
parser.add_argument("--save", type=str)
cfg = parser.parse_args()
VOCAB, DIM, HEADS, LENGTH = 40, 32, 2, 22
if cfg.one:
    rank, world = 0, 1
else:
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()


class _AllGather(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, dim):
        ctx.dim = dim
        bits = [torch.empty_like(x) for _ in range(world)]
        dist.all_gather(bits, x.contiguous())
        return torch.cat(bits, dim)

    @staticmethod
    def backward(ctx, g):
        g = g.contiguous()
        dist.all_reduce(g)
        return g.chunk(world, ctx.dim)[rank], None


def positions_in_documents(doc_ids):
    """[7, 7, 8, 8, 8] -> [0, 1, 0, 1, 2] for every row."""
    index = torch.arange(doc_ids.shape[1]).expand_as(doc_ids)
    fresh = torch.ones_like(doc_ids, dtype=torch.bool)
    fresh[:, 1:] = doc_ids[:, 1:] != doc_ids[:, :-1]
    return index - torch.where(fresh, index, 0).cummax(1).values


def rotate(x, positions):
    half = x.shape[-1] // 2
    angles = positions[:, None, :, None] * 100.0 ** (-torch.arange(half) / half)
    a, b = x.split(half, -1)
    return torch.cat([a * angles.cos() - b * angles.sin(), a * angles.sin() + b * angles.cos()], -1)


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.wqkv, self.wo = nn.Linear(DIM, 3 * DIM, bias=False), nn.Linear(DIM, DIM, bias=False)

    def forward(self, x, positions, mask):
        q, k, v = (t.unflatten(-1, (HEADS, -1)).transpose(1, 2) for t in self.wqkv(x).chunk(3, -1))
        q, k = rotate(q, positions), rotate(k, positions)
        if world > 1:
            k, v = _AllGather.apply(k, 2), _AllGather.apply(v, 2)
        return self.wo(F.scaled_dot_product_attention(q, k, v, mask).transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.attn, self.norm2 = nn.RMSNorm(DIM), Attention(), nn.RMSNorm(DIM)
        self.gate, self.up, self.down = nn.Linear(DIM, 48), nn.Linear(DIM, 48), nn.Linear(48, DIM)

    def forward(self, x, positions, mask):
        x = x + self.attn(self.norm1(x), positions, mask)
        h = self.norm2(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


class Transformer(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, DIM)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.lm_head = nn.Linear(DIM, VOCAB, bias=False)

    def forward(self, ids, docs):
        own = docs.chunk(world, 1)[rank]
        if cfg.faulty:
            positions = positions_in_documents(own)
        else:
            positions = positions_in_documents(docs).chunk(world, 1)[rank]
        places = torch.arange(LENGTH)
        causal = places.chunk(world)[rank][:, None] >= places
        mask = (causal & (own[:, :, None] == docs[:, None, :]))[:, None]
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x, positions, mask)
        return self.lm_head(x)


torch.manual_seed(5)
model = Transformer()
optimizer = torch.optim.Adam(model.parameters(), lr=4e-3, eps=1e-3)
for step in range(1, 6):
    g = torch.Generator().manual_seed(step)
    text = torch.randint(0, VOCAB, (6, LENGTH + 1), generator=g)
    docs = (torch.rand(6, LENGTH, generator=g) < 0.12).cumsum(1)
    ids, labels = (t.chunk(world, 1)[rank] for t in (text[:, :-1], text[:, 1:]))
    loss = F.cross_entropy(model(ids, docs).flatten(0, 1), labels.flatten()) / world
    optimizer.zero_grad()
    loss.backward()
    loss = loss.detach()
    if world > 1:
        for p in model.parameters():
            dist.all_reduce(p.grad)
        dist.all_reduce(loss)
    optimizer.step()
    if rank == 0:
        print(f"step {step} loss {loss.item():.7f}", flush=True)
if cfg.save:
    torch.save(model.state_dict(), os.path.join(cfg.save, f"rank{rank}.pt"))
if not cfg.one:
    dist.destroy_process_group()
