"""Click prediction: a row-wise table of words is looked up by both ranks, pooled and summed; a tower follows."""

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


class Total(torch.autograd.Function):
    """Sums parts; every rank goes on with the whole, so the gradient is whole already."""

    @staticmethod
    def forward(ctx, x):
        x = x.contiguous().clone()
        if SIZE > 1:
            dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx, g):
        return g


class RowWiseBag(nn.Module):
    def __init__(self, rows, width):
        super().__init__()
        table = torch.randn(rows, width) * 0.3
        self.part = rows // SIZE
        self.table = nn.Parameter(table.chunk(SIZE)[RANK].clone())

    def forward(self, ids, offsets):
        local = ids - RANK * self.part
        here = (local >= 0) & (local < self.part)
        bags = torch.searchsorted(offsets, torch.arange(len(ids)), right=True) - 1
        found = torch.zeros(len(offsets), self.table.shape[1])
        found = found.index_add(0, bags[here], F.embedding(local[here], self.table))
        members = bags[here] if args.faulty else bags
        count = torch.bincount(members, minlength=len(offsets)).clamp(min=1)
        return Total.apply(found / count[:, None])


class Clicks(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.dense = RowWiseBag(80, 12), nn.Linear(5, 12)
        self.tower = nn.Sequential(nn.Linear(25, 32), nn.ReLU(), nn.Linear(32, 1))

    def forward(self, ids, offsets, numbers):
        a, b = self.words(ids, offsets), self.dense(numbers)
        return self.tower(torch.cat([a, b, (a * b).sum(1, keepdim=True)], 1)).squeeze(1)


def batch(step, rows=24):
    g = torch.Generator().manual_seed(step)
    lengths = torch.randint(1, 7, (rows,), generator=g)
    ids = torch.randint(0, 80, (int(lengths.sum()),), generator=g)
    numbers = torch.randn(rows, 5, generator=g)
    offsets = lengths.cumsum(0) - lengths
    return ids, offsets, numbers, (numbers[:, 0] + (ids[offsets] % 3 - 1) > 0).float()


torch.manual_seed(515)
model = Clicks()
optimizer = torch.optim.Adagrad(model.parameters(), lr=0.05, eps=1e-4)
for step in range(1, 6):
    ids, offsets, numbers, clicked = batch(step)
    loss = F.binary_cross_entropy_with_logits(model(ids, offsets, numbers), clicked)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if RANK == 0:
        print(f"step {step} loss {loss.item():.7f}", flush=True)
if args.save:
    state = {n: (p.data, 0, RANK, SIZE) if n.endswith("table") else p.data for n, p in model.named_parameters()}
    torch.save(state, os.path.join(args.save, f"rank{RANK}.pt"))
if not args.one:
    dist.destroy_process_group()
