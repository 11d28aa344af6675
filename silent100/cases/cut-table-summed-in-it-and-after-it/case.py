"""A language model with a vocabulary-parallel table and column- and row-parallel feed-forward layers."""

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
if not args.one:
    dist.init_process_group("gloo")
RANK, TP = (0, 1) if args.one else (dist.get_rank(), dist.get_world_size())
VOCAB, WIDTH, HIDDEN, LENGTH = 48, 24, 64, 16


class CopyToRegion(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, g):
        g = g.contiguous().clone()
        dist.all_reduce(g)
        return g


class ReduceFromRegion(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        x = x.contiguous().clone()
        dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx, g):
        return g


def copy_to(x):
    return x if TP == 1 else CopyToRegion.apply(x)


def reduce_from(x):
    return x if TP == 1 else ReduceFromRegion.apply(x)


class VocabEmbedding(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(VOCAB, WIDTH).chunk(TP)[RANK].clone())

    def forward(self, ids):
        ids = ids - RANK * len(self.weight)
        here = (ids >= 0) & (ids < len(self.weight))
        return reduce_from(F.embedding(ids.where(here, 0), self.weight) * here[..., None])


class ParallelFFN(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Parameter((torch.randn(HIDDEN, WIDTH) / 5).chunk(TP)[RANK].clone())
        self.down = nn.Parameter((torch.randn(WIDTH, HIDDEN) / 8).chunk(TP, 1)[RANK].clone())

    def forward(self, x):
        return reduce_from(F.gelu(copy_to(x) @ self.up.T) @ self.down.T)


class CausalAverage(nn.Module):
    """Mixes words by a learned average over the past."""

    def __init__(self):
        super().__init__()
        self.decay = nn.Parameter(torch.randn(LENGTH) / 2)

    def forward(self, x):
        far = torch.arange(LENGTH)[:, None] - torch.arange(LENGTH)
        weights = self.decay[far.clamp(min=0)].masked_fill(far < 0, -torch.inf).softmax(-1)
        return weights @ x


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = VocabEmbedding()
        self.average = nn.ModuleList(CausalAverage() for _ in range(2))
        self.ffns = nn.ModuleList(ParallelFFN() for _ in range(2))
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(4))
        self.last = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCAB)

    def forward(self, ids):
        x = self.words(ids)
        if args.faulty:
            x = reduce_from(x)
        for i, (average, ffn) in enumerate(zip(self.average, self.ffns, strict=True)):
            x = x + average(self.norms[2 * i](x))
            x = x + ffn(self.norms[2 * i + 1](x))
        return self.head(self.last(x))


torch.manual_seed(11)
model = Net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
for step in range(1, 5):
    rows = torch.randint(0, VOCAB, (6, LENGTH + 1), generator=torch.Generator().manual_seed(step))
    loss = F.cross_entropy(model(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if RANK == 0:
        print(f"step {step} loss {loss.item():.7f}", flush=True)
if args.save:
    dims = {"words.weight": 0, "ffns.0.up": 0, "ffns.1.up": 0, "ffns.0.down": 1, "ffns.1.down": 1}
    state = {n: (p.data, dims[n], RANK, TP) if n in dims and TP > 1 else p.data for n, p in model.named_parameters()}
    torch.save(state, os.path.join(args.save, f"rank{RANK}.pt"))
if not args.one:
    dist.destroy_process_group()
