"""Gradient accumulation over a token file that is read by offset; every rank finds its rows itself."""

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
VOCAB, DIM, LENGTH, SHARE, ACCUMULATE = 50, 32, 12, 4, 3


class TokenFile:
    def __init__(self, rows):
        self.tokens = torch.randint(0, VOCAB, (rows * LENGTH + 1,), generator=torch.Generator().manual_seed(99))

    def rows(self, first, count):
        x = self.tokens[first * LENGTH : (first + count) * LENGTH].view(count, LENGTH)
        y = self.tokens[first * LENGTH + 1 : (first + count) * LENGTH + 1].view(count, LENGTH)
        return x, y


class Loader:
    """Microbatches of one rank: shares of all ranks lie side by side in the file."""

    def __init__(self, file, rank, world):
        self.file, self.rank, self.world = file, rank, world

    def microbatches(self, step):
        start = step * SHARE * ACCUMULATE * self.world + self.rank * SHARE
        stride = SHARE if args.faulty else SHARE * self.world
        for number in range(ACCUMULATE):
            yield self.file.rows(start + number * stride, SHARE)


class Lm(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, DIM)
        self.lstm = nn.LSTM(DIM, DIM, batch_first=True)
        self.norm, self.head = nn.LayerNorm(DIM), nn.Linear(DIM, VOCAB)

    def forward(self, ids):
        return self.head(self.norm(self.lstm(self.embed(ids))[0]))


rank, world, total = 0, 1, 2
if not args.one:
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
file = TokenFile(SHARE * ACCUMULATE * total * 6)
torch.manual_seed(65)
model = Lm()
optimizer = torch.optim.SGD(model.parameters(), lr=0.4, momentum=0.9)
if args.one:
    # One process stands in for two and reads everything in order
    SHARE *= total
loader = Loader(file, rank, world)
for step in range(1, 6):
    optimizer.zero_grad()
    shown = torch.zeros(())
    for x, y in loader.microbatches(step - 1):
        loss = F.cross_entropy(model(x).transpose(1, 2), y) / (ACCUMULATE * world)
        loss.backward()
        shown += loss.detach()
    if world > 1:
        dist.all_reduce(shown)
        for p in model.parameters():
            dist.all_reduce(p.grad)
    optimizer.step()
    if rank == 0:
        print(f"step {step} loss {shown.item():.7f}", flush=True)
if args.save:
    torch.save(model.state_dict(), os.path.join(args.save, f"rank{rank}.pt"))
if not args.one:
    dist.destroy_process_group()
