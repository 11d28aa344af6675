"""Batch norm over the rows of all ranks, written by hand for a small convolutional net."""

import os
import sys

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

ONE, FAULTY = "--one" in sys.argv, "--faulty" in sys.argv
if not ONE:
    dist.init_process_group("gloo")
rank, world = (0, 1) if ONE else (dist.get_rank(), dist.get_world_size())


class Total(torch.autograd.Function):
    """Sums over ranks."""

    @staticmethod
    def forward(ctx, x):
        x = x.clone()
        if world > 1:
            dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx, g):
        if world > 1 and not FAULTY:
            g = g.clone()
            dist.all_reduce(g)
        return g


class BatchNorm(nn.Module):
    def __init__(self, channels):
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(channels)), nn.Parameter(torch.zeros(channels))

    def forward(self, x):
        count = x.numel() / x.shape[1] * world
        mean = Total.apply(x.sum((0, 2, 3))) / count
        x = x - mean[:, None, None]
        var = Total.apply(x.square().sum((0, 2, 3))) / count
        return x * (self.weight / (var + 1e-5).sqrt())[:, None, None] + self.bias[:, None, None]


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(1, 8, 3, bias=False), BatchNorm(8)
        self.conv2, self.bn2 = nn.Conv2d(8, 12, 3, stride=2, bias=False), BatchNorm(12)
        self.head = nn.Linear(12, 4)

    def forward(self, x):
        x = torch.relu(self.bn1(self.conv1(x)))
        return self.head(torch.relu(self.bn2(self.conv2(x))).mean((2, 3)))


torch.manual_seed(15)
net = Net()
optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
for step in range(1, 6):
    g = torch.Generator().manual_seed(step)
    classes = torch.randint(0, 4, (8,), generator=g)
    x = torch.randn(8, 1, 9, 9, generator=g) * (1 + classes[:, None, None, None])
    x, classes = x[rank::world], classes[rank::world]
    loss = F.cross_entropy(net(x), classes) / world
    optimizer.zero_grad()
    loss.backward()
    shown = loss.detach()
    if world > 1:
        for p in net.parameters():
            dist.all_reduce(p.grad)
        dist.all_reduce(shown)
    optimizer.step()
    if rank == 0:
        print(f"step {step} loss {shown.item():.7f}", flush=True)
if "--save" in sys.argv:
    torch.save(net.state_dict(), os.path.join(sys.argv[sys.argv.index("--save") + 1], f"rank{rank}.pt"))
if world > 1:
    dist.destroy_process_group()
