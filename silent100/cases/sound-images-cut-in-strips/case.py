"""Spatial parallelism: strips of rows, with halos for 3 x 3 kernels."""

import argparse
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

cli = argparse.ArgumentParser()
cli.add_argument("--one", action="store_true")
cli.add_argument("--save")
args = cli.parse_args()
rank, world = 0, 1
if not args.one:
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()


def trade(up, down):
    """Sends a row to the rank above and one to the rank below; zeros come from beyond the border."""
    above, below = torch.zeros_like(up), torch.zeros_like(down)
    works = []
    if rank > 0:
        works += [dist.isend(up.contiguous(), rank - 1), dist.irecv(above, rank - 1)]
    if rank < world - 1:
        works += [dist.isend(down.contiguous(), rank + 1), dist.irecv(below, rank + 1)]
    for work in works:
        work.wait()
    return above, below


class Halo(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        if world == 1:
            return F.pad(x, (0, 0, 1, 1))
        above, below = trade(x[:, :, :1].contiguous(), x[:, :, -1:].contiguous())
        return torch.cat([above, x, below], 2)

    @staticmethod
    def backward(ctx, g):
        inner = g[:, :, 1:-1].clone()
        if world > 1:
            above, below = trade(g[:, :, :1].contiguous(), g[:, :, -1:].contiguous())
            inner[:, :, :1] += above
            inner[:, :, -1:] += below
        return inner


class Segment(nn.Module):
    def __init__(self, width=8):
        super().__init__()
        self.convs = nn.ModuleList(nn.Conv2d(a, width, 3, padding=(0, 1)) for a in (2, width, width))
        self.out = nn.Conv2d(width, 3, 1)

    def forward(self, x):
        for conv in self.convs:
            x = F.leaky_relu(conv(Halo.apply(x)))
        return self.out(x)


torch.manual_seed(333)
net = Segment()
optimizer = torch.optim.SGD(net.parameters(), lr=0.2, momentum=0.9)
for step in range(1, 5):
    g = torch.Generator().manual_seed(step)
    images, labels = torch.randn(3, 2, 12, 10, generator=g), torch.randint(0, 3, (3, 12, 10), generator=g)
    loss = F.cross_entropy(net(images.chunk(world, 2)[rank]), labels.chunk(world, 1)[rank]) / world
    optimizer.zero_grad()
    loss.backward()
    loss = loss.detach()
    if world > 1:
        for t in [p.grad for p in net.parameters()] + [loss]:
            dist.all_reduce(t)
    optimizer.step()
    if rank == 0:
        print(f"step {step} loss {loss.item():.7f}", flush=True)
if args.save:
    torch.save(net.state_dict(), os.path.join(args.save, f"rank{rank}.pt"))
if world > 1:
    dist.destroy_process_group()
