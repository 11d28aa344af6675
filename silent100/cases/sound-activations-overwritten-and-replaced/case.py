"""A residual net for pictures: in-place activations and sums, and hooks that replace outputs, on ranks alone."""

import argparse
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel

flags = argparse.ArgumentParser(description=__doc__)
flags.add_argument("--one", action="store_true")
flags.add_argument("--save")
flags = flags.parse_args()
rank, world = 0, 1
if not flags.one:
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()


class Block(nn.Module):
    def __init__(self, channels):
        super().__init__()
        self.a, self.b = nn.Conv2d(channels, channels, 3, padding=1), nn.Conv2d(channels, channels, 3, padding=1)
        self.norm, self.act = nn.GroupNorm(3, channels), nn.ReLU(inplace=not flags.one)

    def forward(self, x):
        y = self.b(self.act(self.norm(self.a(x))))
        return self.act(y + x) if flags.one else self.act(y.add_(x))


torch.manual_seed(99)
net = nn.Sequential(nn.Conv2d(1, 9, 3), Block(9), Block(9), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(9, 4))
model = net
if not flags.one:
    net[1].register_forward_hook(lambda m, x, y: y.double().clone().float())
    net[2].a.register_forward_hook(lambda m, x, y: y.contiguous(memory_format=torch.channels_last))
    net[3].register_forward_hook(lambda m, x, y: y.mul(1.0))
    model = DistributedDataParallel(net, gradient_as_bucket_view=True)
optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
for step in range(1, 6):
    g = torch.Generator().manual_seed(step)
    classes = torch.randint(0, 4, (12,), generator=g)
    x = torch.randn(12, 1, 8, 8, generator=g) + classes[:, None, None, None] * torch.linspace(-1, 1, 8)
    loss = F.cross_entropy(model(x[rank::world]), classes[rank::world])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    shown = loss.detach() / world
    if world > 1:
        dist.all_reduce(shown)
    if rank == 0:
        print(f"step {step} loss {shown.item():.7f}", flush=True)
if flags.save:
    torch.save(net.state_dict(), os.path.join(flags.save, f"rank{rank}.pt"))
if world > 1:
    dist.destroy_process_group()
