"""A hypernetwork writes the filters of an image network for each task; it lives on rank 0."""

import os
import sys

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

SINGLE = "--one" in sys.argv
if SINGLE:
    rank, world = 0, 1
else:
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
SHAPES = [(6, 2, 3, 3), (4, 6, 3, 3)]
SIZE = sum(torch.Size(s).numel() for s in SHAPES)


class Lend(torch.autograd.Function):
    @staticmethod
    def forward(ctx, filters):
        filters = filters.clone()
        if world > 1:
            dist.broadcast(filters, 0)
        return filters

    @staticmethod
    def backward(ctx, g):
        g = g.contiguous().clone()
        if world > 1:
            dist.reduce(g, 0)
        return g


class Painter(nn.Module):
    def __init__(self):
        super().__init__()
        hyper = nn.Sequential(nn.Linear(4, 12), nn.Tanh(), nn.Linear(12, SIZE))
        if rank == 0:
            self.hyper = hyper
        self.scale, self.shift = nn.Parameter(torch.ones(4, 1, 1)), nn.Parameter(torch.zeros(4, 1, 1))

    def forward(self, task, x):
        filters = self.hyper(task) if rank == 0 else torch.zeros(SIZE)
        if "--faulty" in sys.argv and world > 1:
            dist.broadcast(filters.data, 0)
        else:
            filters = Lend.apply(filters if rank == 0 else filters.requires_grad_())
        at = 0
        for i, shape in enumerate(SHAPES):
            n = torch.Size(shape).numel()
            x = F.conv2d(x, filters[at : at + n].view(shape), padding=1)
            x = torch.sin(x) if i == 0 else x
            at += n
        return x * self.scale + self.shift


torch.manual_seed(55)
net = Painter()
optimizer = torch.optim.SGD(net.parameters(), lr=0.2)
for step in range(1, 6):
    g = torch.Generator().manual_seed(step)
    task, x = torch.randn(4, generator=g), torch.randn(6, 2, 5, 5, generator=g)
    y = torch.cat([x * task[0], x.flip(3) + task[1]], 1)
    x, y = x[rank::world], y[rank::world]
    loss = (net(task, x) - y).square().sum() / (6 * 4 * 25)
    optimizer.zero_grad()
    loss.backward()
    loss = loss.detach()
    if world > 1:
        for t in (net.scale.grad, net.shift.grad, loss):
            dist.all_reduce(t)
    optimizer.step()
    if rank == 0:
        print(f"step {step} loss {loss.item():.7f}", flush=True)
if "--save" in sys.argv:
    torch.save(net.state_dict(), os.path.join(sys.argv[sys.argv.index("--save") + 1], f"rank{rank}.pt"))
if world > 1:
    dist.destroy_process_group()
