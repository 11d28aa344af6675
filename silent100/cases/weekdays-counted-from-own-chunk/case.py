"""Forecasts of daily sales; a long history is cut over ranks, a learned weekday is added to each day."""

import argparse
import os

import torch
import torch.distributed as dist
import torch.nn as nn

cli = argparse.ArgumentParser()
cli.add_argument("--one", action="store_true")
cli.add_argument("--faulty", action="store_true")
cli.add_argument("--save")
cli = cli.parse_args()
DAYS = 24


class Cut:
    """Where this process stands in the history."""

    rank, world = 0, 1

    @classmethod
    def start(cls):
        if not cli.one:
            dist.init_process_group("gloo")
            cls.rank, cls.world = dist.get_rank(), dist.get_world_size()
        cls.days = DAYS // cls.world
        cls.begin = 0 if cli.faulty else cls.rank * cls.days

    @classmethod
    def add(cls, t):
        t = t.clone()
        if cls.world > 1:
            dist.all_reduce(t)
        return t


class Total(torch.autograd.Function):
    @staticmethod
    def forward(ctx, t):
        return Cut.add(t)

    @staticmethod
    def backward(ctx, g):
        return Cut.add(g.contiguous())


class Forecaster(nn.Module):
    def __init__(self):
        super().__init__()
        self.calendar = nn.Embedding(7, 12)
        self.lift = nn.Linear(4, 12)
        self.mix = nn.GRUCell(12, 12)
        self.head = nn.Linear(24, 1)

    def forward(self, x):
        day = (Cut.begin + torch.arange(x.shape[1])) % 7
        h = self.lift(x) + self.calendar(day)
        h = h + self.mix(h.flatten(0, 1), h.flatten(0, 1).tanh()).view_as(h)
        level = Total.apply(h.sum(1, keepdim=True)) / DAYS
        return self.head(torch.cat([h, level.expand_as(h)], -1))[..., 0]


def main():
    Cut.start()
    torch.manual_seed(3)
    net = Forecaster()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.5)
    for step in range(1, 6):
        g = torch.Generator().manual_seed(step)
        x = torch.randn(4, DAYS, 4, generator=g)
        y = x.sum(-1) * 0.3 + torch.arange(DAYS) % 7 / 40
        x, y = x.chunk(Cut.world, 1)[Cut.rank], y.chunk(Cut.world, 1)[Cut.rank]
        loss = (net(x) - y).square().sum() / (4 * DAYS)
        optimizer.zero_grad()
        loss.backward()
        for p in net.parameters():
            p.grad = Cut.add(p.grad)
        optimizer.step()
        loss = Cut.add(loss.detach())
        if Cut.rank == 0:
            print(f"step {step} loss {loss.item():.7f}", flush=True)
    if cli.save:
        torch.save(net.state_dict(), os.path.join(cli.save, f"rank{Cut.rank}.pt"))
    if Cut.world > 1:
        dist.destroy_process_group()


main()
