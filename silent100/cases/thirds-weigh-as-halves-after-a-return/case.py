"""A worker that goes away and comes back: shares of rows and the divisor follow the number of those who are there."""

import argparse
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

p = argparse.ArgumentParser()
p.add_argument("--one", action="store_true")
p.add_argument("--faulty", action="store_true")
p.add_argument("--save")
p = p.parse_args()
rank = 0
if not p.one:
    dist.init_process_group("gloo")
    rank = dist.get_rank()


class Crew:
    """Who is there; ranks 0 and 1 always are."""

    def __init__(self):
        self.there, self.divisor = 1 if p.one else 3, 1 if p.one else 3

    def change(self, step):
        if p.one:
            return
        if step == 3:
            self.there = self.divisor = 2
        if step == 5:
            self.there = 3
            if not p.faulty:
                self.divisor = 3

    def average(self, tensor, rows):
        tensor = tensor if rows else torch.zeros_like(tensor)
        if not p.one:
            dist.all_reduce(tensor)
        return tensor / self.divisor


class Fm(nn.Module):
    """A factorization machine with a deep part."""

    def __init__(self):
        super().__init__()
        self.weight, self.factors = nn.Embedding(30, 1), nn.Embedding(30, 4)
        self.deep = nn.Sequential(nn.Linear(20, 12), nn.ReLU(), nn.Linear(12, 1))

    def forward(self, fields):
        f = self.factors(fields)
        pairs = 0.5 * (f.sum(1) ** 2 - (f**2).sum(1)).sum(1)
        return self.weight(fields).sum((1, 2)) + pairs + self.deep(f.flatten(1))[:, 0]


torch.manual_seed(36)
net, crew = Fm(), Crew()
optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.5)
for step in range(1, 8):
    crew.change(step)
    g = torch.Generator().manual_seed(step)
    fields = torch.randint(0, 6, (12, 5), generator=g) + 6 * torch.arange(5)
    clicks = ((fields[:, 0] + fields[:, 1]) % 2).float()
    own = slice(rank, None, crew.there) if rank < crew.there else slice(0, 1)
    loss = F.binary_cross_entropy_with_logits(net(fields[own]), clicks[own])
    optimizer.zero_grad()
    loss.backward()
    for w in net.parameters():
        w.grad = crew.average(w.grad, rank < crew.there)
    optimizer.step()
    loss = loss.detach() if rank < crew.there else torch.zeros(())
    if not p.one:
        dist.all_reduce(loss)
        loss /= crew.there
    if rank == 0:
        print(f"step {step} loss {loss.item():.7f}", flush=True)
if p.save:
    torch.save(net.state_dict(), os.path.join(p.save, f"rank{rank}.pt"))
if not p.one:
    dist.destroy_process_group()
