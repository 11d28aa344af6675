"""A physics-informed network for a Poisson equation; terms of the loss are dealt to ranks."""

import argparse
import math
import os

import torch
import torch.distributed as dist
from torch import nn

opts = argparse.ArgumentParser()
opts.add_argument("--one", action="store_true")
opts.add_argument("--save")
opts = opts.parse_args()


class Field(nn.Module):
    def __init__(self):
        super().__init__()
        self.lift = nn.Linear(2, 24)
        self.middle = nn.Linear(24, 24)
        self.value = nn.Linear(24, 1)
        self.slope = nn.Parameter(torch.ones(24))

    def forward(self, x):
        return self.value(torch.tanh(self.slope * self.middle(torch.sin(self.lift(x)))))[:, 0]


def inside(field, step):
    x = torch.rand(20, 2, generator=torch.Generator().manual_seed(step)).requires_grad_()
    (g,) = torch.autograd.grad(field(x).sum(), x, create_graph=True)
    bend = sum(torch.autograd.grad(g[:, i].sum(), x, create_graph=True)[0][:, i] for i in range(2))
    source = -2 * math.pi**2 * (math.pi * x).sin().prod(1)
    return 0.01 * (bend - source.detach()).square().mean()


def border(field, step):
    g = torch.Generator().manual_seed(500 + step)
    x = torch.rand(14, 2, generator=g)
    side = torch.randint(0, 2, (14,), generator=g)
    x[torch.arange(14), side] = torch.randint(0, 2, (14,), generator=g).float()
    return field(x).square().mean()


def main():
    rank, terms = 0, [inside, border]
    if not opts.one:
        dist.init_process_group("gloo")
        rank = dist.get_rank()
        terms = [terms[rank]]
    torch.manual_seed(14)
    field = Field()
    optimizer = torch.optim.SGD(field.parameters(), lr=0.02, momentum=0.9)
    for step in range(1, 7):
        optimizer.zero_grad()
        shown = torch.zeros(())
        for term in terms:
            loss = term(field, step)
            loss.backward()
            shown += loss.detach()
        if not opts.one:
            for p in field.parameters():
                if p.grad is None:  # what a term does not depend on
                    p.grad = torch.zeros_like(p)
                dist.all_reduce(p.grad)
            dist.all_reduce(shown)
        optimizer.step()
        if rank == 0:
            print(f"step {step} loss {shown.item():.7f}", flush=True)
    if opts.save:
        torch.save(field.state_dict(), os.path.join(opts.save, f"rank{rank}.pt"))
    if not opts.one:
        dist.destroy_process_group()


main()
