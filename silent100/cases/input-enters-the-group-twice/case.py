"""A small T5-like gated feed-forward stack with tensor parallelism and an Adafactor-free plain optimizer."""

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
RANK, SIZE = (0, 1) if args.one else (dist.get_rank(), dist.get_world_size())


def summed(x):
    x = x.contiguous().clone()
    if SIZE > 1:
        dist.all_reduce(x)
    return x


class ToGroup(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, g):
        return summed(g)


class FromGroup(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return summed(x)

    @staticmethod
    def backward(ctx, g):
        return g


class Column(nn.Module):
    """Holds some of the outputs; with `enters` its input's gradient is summed here."""

    def __init__(self, a, b, enters):
        super().__init__()
        self.weight = nn.Parameter((torch.randn(b, a) * a**-0.5).chunk(SIZE)[RANK].clone())
        self.enters = enters

    def forward(self, x):
        return F.linear(ToGroup.apply(x) if self.enters else x, self.weight)


class Row(nn.Module):
    def __init__(self, a, b):
        super().__init__()
        self.weight = nn.Parameter((torch.randn(b, a) * a**-0.5 * 0.5).chunk(SIZE, 1)[RANK].clone())

    def forward(self, x):
        return FromGroup.apply(F.linear(x, self.weight))


class Gated(nn.Module):
    def __init__(self, d, hidden):
        super().__init__()
        self.norm = nn.RMSNorm(d)
        # Both read one copy, so that its gradient travels once
        self.wi0, self.wi1 = (Column(d, hidden, enters=args.faulty) for _ in range(2))
        self.wo = Row(hidden, d)

    def forward(self, x):
        z = ToGroup.apply(self.norm(x))
        return x + self.wo(F.gelu(self.wi0(z), approximate="tanh") * self.wi1(z))


class Filler(nn.Module):
    """Guesses a word from the words around it."""

    def __init__(self, words=52, d=20):
        super().__init__()
        self.embed, self.norm = nn.Embedding(words, d), nn.RMSNorm(d)
        self.layers = nn.Sequential(*(Gated(d, 40) for _ in range(2)))
        self.head = nn.Linear(d, words, bias=False)

    def forward(self, around):
        return self.head(self.norm(self.layers(self.embed(around).mean(1))))


torch.manual_seed(2002)
model = Filler()
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
for step in range(1, 5):
    rows = torch.randint(0, 52, (24, 5), generator=torch.Generator().manual_seed(step))
    loss = F.cross_entropy(model(rows[:, [0, 1, 3, 4]]), rows[:, 2])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if RANK == 0:
        print(f"step {step} loss {loss.item():.7f}", flush=True)
if args.save:
    cut, state = {"wi0": 0, "wi1": 0, "wo": 1}, {}
    for name, p in model.named_parameters():
        dim = cut.get(name.split(".")[-2])
        state[name] = p.data if dim is None else (p.data, dim, RANK, SIZE)
    torch.save(state, os.path.join(args.save, f"rank{RANK}.pt"))
if not args.one:
    dist.destroy_process_group()
