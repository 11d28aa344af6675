"""A bidirectional encoder whose heads are cut over ranks; heads are folded into the batch for bmm."""

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

VOCAB, DIM, HEADS, LENGTH = 30, 32, 4, 10


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


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.q, self.k, self.v = (cut(nn.Linear(DIM, DIM, bias=False), 0) for _ in range(3))
        self.o, self.heads = cut(nn.Linear(DIM, DIM, bias=False), 1), HEADS // world

    def fold(self, x):
        return x.unflatten(-1, (self.heads, -1)).transpose(1, 2).flatten(0, 1)

    def forward(self, x, padding):
        x = Enter.apply(x)
        q, k, v = (self.fold(p(x)) for p in (self.q, self.k, self.v))
        hidden = padding.repeat(self.heads, 1) if flags.faulty else padding.repeat_interleave(self.heads, 0)
        scores = (q @ k.transpose(1, 2) / q.shape[-1] ** 0.5).masked_fill(hidden[:, None], -1e9)
        y = (scores.softmax(-1) @ v).unflatten(0, (-1, self.heads)).transpose(1, 2).flatten(2)
        return Leave.apply(self.o(y))


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.places = nn.Embedding(VOCAB, DIM), nn.Embedding(LENGTH, DIM)
        self.norms = nn.ModuleList(nn.LayerNorm(DIM) for _ in range(2))
        self.attn = nn.ModuleList(Attention() for _ in range(2))
        self.head = nn.Linear(DIM, VOCAB)

    def forward(self, ids, padding):
        x = self.words(ids) + self.places.weight
        for norm, attn in zip(self.norms, self.attn):
            x = x + attn(norm(x), padding)
        return self.head(x)


torch.manual_seed(17)
encoder = Encoder()
optimizer = torch.optim.Adam(encoder.parameters(), lr=3e-3, eps=1e-4)
for step in range(1, 6):
    g = torch.Generator().manual_seed(step)
    text = torch.randint(1, VOCAB, (8, LENGTH), generator=g)
    padding = torch.arange(LENGTH) >= torch.randint(3, LENGTH + 1, (8, 1), generator=g)
    asked = (torch.rand(8, LENGTH, generator=g) < 0.3) & ~padding
    asked[0, 0] = True
    logits = encoder(text.masked_fill(asked, 0), padding)
    loss = F.cross_entropy(logits[asked], text[asked])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if rank == 0:
        print(f"step {step} loss {loss.item():.7f}", flush=True)
whole = {}
for name, p in encoder.named_parameters():
    whole[name] = (p.detach(), p.dim_cut, rank, world) if hasattr(p, "dim_cut") else p.detach()
if flags.save:
    torch.save(whole, os.path.join(flags.save, f"rank{rank}.pt"))
if world > 1:
    dist.destroy_process_group()
