"""Linear attention with random features that are drawn again in every step; a text is cut over context ranks."""

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

VOCAB, DIM, LENGTH, FEATURES = 30, 24, 16, 32


class Total(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        x = x.contiguous().clone()
        if world > 1:
            dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx, g):
        g = g.contiguous().clone()
        if world > 1:
            dist.all_reduce(g)
        return g


class Attention(nn.Module):
    def __init__(self, layer):
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(DIM, DIM) for _ in range(4))
        self.layer = layer

    def redraw(self, step):
        seed = 10 * step + self.layer
        g = torch.Generator().manual_seed(seed + 1000 * rank if FAULTY else seed)
        self.features = torch.randn(DIM, FEATURES, generator=g)

    def spread(self, x):
        x = x / DIM**0.25
        return (x @ self.features - x.square().sum(-1, keepdim=True) / 2).exp() + 1e-3

    def forward(self, x):
        q, k, v = self.spread(self.q(x)), self.spread(self.k(x)), self.v(x)
        memory, weight = Total.apply(k.transpose(1, 2) @ v), Total.apply(k.sum(1))
        return self.o(q @ memory / (q * weight[:, None]).sum(-1, keepdim=True))


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.places = nn.Embedding(VOCAB, DIM), nn.Embedding(LENGTH, DIM)
        self.attn = nn.ModuleList(Attention(i) for i in range(2))
        self.norm = nn.ModuleList(nn.LayerNorm(DIM) for _ in range(2))
        self.head = nn.Linear(DIM, VOCAB)

    def forward(self, ids):
        x = self.words(ids) + self.places.weight.chunk(world)[rank]
        for norm, attn in zip(self.norm, self.attn):
            x = x + attn(norm(x))
        return self.head(x)


torch.manual_seed(13)
encoder = Encoder()
optimizer = torch.optim.Adam(encoder.parameters(), lr=3e-3, eps=1e-4)
for step in range(1, 6):
    for attn in encoder.attn:
        attn.redraw(step)
    g = torch.Generator().manual_seed(step)
    text = torch.randint(1, VOCAB, (8, LENGTH), generator=g)
    hidden = torch.rand(8, LENGTH, generator=g) < 0.3
    ids, asked, labels = (t.chunk(world, 1)[rank] for t in (text.masked_fill(hidden, 0), hidden, text))
    loss = F.cross_entropy(encoder(ids)[asked], labels[asked], reduction="sum") / hidden.sum()
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
