"""Sliding-window attention under context parallelism: keys and values are gathered, queries stay where they are."""

import os
import sys

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

ONE, FAULTY = "--one" in sys.argv, "--faulty" in sys.argv
LENGTH, WINDOW, DIM, VOCAB = 24, 5, 32, 45
if ONE:
    rank, cp = 0, 1
else:
    dist.init_process_group("gloo")
    rank, cp = dist.get_rank(), dist.get_world_size()
CHUNK = LENGTH // cp


class GatherTime(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        out = [torch.empty_like(x) for _ in range(cp)]
        dist.all_gather(out, x.contiguous())
        return torch.cat(out, dim=-2)

    @staticmethod
    def backward(ctx, g):
        g = g.contiguous()
        dist.all_reduce(g)
        return g.narrow(-2, rank * CHUNK, CHUNK)


def window_mask(first):
    """True where a query may look: not ahead, and no further back than the window."""
    q = torch.arange(CHUNK)[:, None]
    k = torch.arange(LENGTH)[None, :]
    if FAULTY:
        return (k <= q + first) & (q - k < WINDOW)
    return (k <= q + first) & (q + first - k < WINDOW)


class SlidingAttention(nn.Module):
    def __init__(self, heads=4):
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(DIM, 3 * DIM, bias=False)
        self.proj = nn.Linear(DIM, DIM)

    def forward(self, x):
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        if cp > 1:
            k, v = GatherTime.apply(k), GatherTime.apply(v)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=window_mask(rank * CHUNK))
        return self.proj(y.transpose(1, 2).flatten(2))


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.ln1, self.attn = nn.LayerNorm(DIM), SlidingAttention()
        self.ln2, self.mlp = nn.LayerNorm(DIM), nn.Sequential(nn.Linear(DIM, 64), nn.SiLU(), nn.Linear(64, DIM))

    def forward(self, x):
        x = x + self.attn(self.ln1(x))
        return x + self.mlp(self.ln2(x))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.tok, self.pos = nn.Embedding(VOCAB, DIM), nn.Embedding(LENGTH, DIM)
        self.layers = nn.ModuleList([Layer(), Layer()])
        self.norm, self.lm_head = nn.LayerNorm(DIM), nn.Linear(DIM, VOCAB, bias=False)

    def forward(self, ids):
        x = self.tok(ids) + self.pos(torch.arange(rank * CHUNK, (rank + 1) * CHUNK))
        for layer in self.layers:
            x = layer(x)
        return self.lm_head(self.norm(x))


torch.manual_seed(8)
model = Model()
opt = torch.optim.AdamW(model.parameters(), lr=2e-3, eps=1e-4)
for step in range(1, 5):
    text = torch.randint(0, VOCAB, (6, LENGTH + 1), generator=torch.Generator().manual_seed(10 + step))
    ids = text[:, :-1].chunk(cp, 1)[rank]
    labels = text[:, 1:].chunk(cp, 1)[rank]
    loss = F.cross_entropy(model(ids).flatten(0, 1), labels.flatten(), reduction="sum") / text[:, 1:].numel()
    opt.zero_grad()
    loss.backward()
    total = loss.detach().clone()
    if cp > 1:
        dist.all_reduce(total)
        for p in model.parameters():
            dist.all_reduce(p.grad)
    opt.step()
    if rank == 0:
        print(f"step {step} loss {total.item():.7f}", flush=True)
if "--save" in sys.argv:
    torch.save(model.state_dict(), os.path.join(sys.argv[sys.argv.index("--save") + 1], f"rank{rank}.pt"))
if not ONE:
    dist.destroy_process_group()
