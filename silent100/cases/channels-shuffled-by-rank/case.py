"""A ShuffleNet unit, channel parallel: four groups of channels, half of them on each rank."""

import os
import sys

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

ONE = "--one" in sys.argv
FAULTY = "--faulty" in sys.argv
if not ONE:
    dist.init_process_group("gloo")
me, parts = (0, 1) if ONE else (dist.get_rank(), dist.get_world_size())
GROUPS, CHANNELS = 4, 16


class GatherChannels(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        if parts == 1:
            return x.clone()
        got = [torch.empty_like(x) for _ in range(parts)]
        dist.all_gather(got, x.contiguous())
        return torch.cat(got, 1)

    @staticmethod
    def backward(ctx, g):
        g = g.contiguous().clone()
        if parts > 1:
            dist.all_reduce(g)
        return g.chunk(parts, 1)[me]


class SumLogits(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        x = x.clone()
        if parts > 1:
            dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx, g):
        return g


class GroupedConv(nn.Module):
    def __init__(self):
        super().__init__()
        w = torch.randn(CHANNELS, CHANNELS // GROUPS, 3, 3) * 0.25
        self.weight = nn.Parameter(w.chunk(parts)[me].clone())

    def forward(self, x):
        return F.conv2d(x, self.weight, padding=1, groups=GROUPS // parts)


def shuffle(x):
    x = GatherChannels.apply(x)
    n, c, h, w = x.shape
    rows = parts if FAULTY else GROUPS
    x = x.view(n, rows, c // rows, h, w).transpose(1, 2).reshape(n, c, h, w)
    return x.chunk(parts, 1)[me]


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, CHANNELS, 3, padding=1)
        self.first, self.second = GroupedConv(), GroupedConv()
        self.out = nn.Parameter((torch.randn(CHANNELS, 6) * 0.3).chunk(parts)[me].clone())

    def forward(self, x):
        x = self.stem(x).chunk(parts, 1)[me]
        x = self.second(shuffle(F.hardswish(self.first(x))))
        return SumLogits.apply(F.hardswish(x).mean((2, 3)) @ self.out)


torch.manual_seed(71)
net = Net()
optimizer = torch.optim.SGD(net.parameters(), lr=0.3)
for step in range(1, 6):
    g = torch.Generator().manual_seed(step)
    images, labels = torch.randn(5, 3, 6, 6, generator=g), torch.randint(0, 6, (5,), generator=g)
    loss = F.cross_entropy(net(images), labels)
    optimizer.zero_grad()
    loss.backward()
    if parts > 1:
        for p in net.stem.parameters():
            dist.all_reduce(p.grad)
    optimizer.step()
    if me == 0:
        print(f"step {step} loss {loss.item():.7f}", flush=True)
if "--save" in sys.argv:
    cut = lambda n, t: t if n.startswith("stem") else (t.clone(), 0, me, parts)  # noqa: E731
    torch.save({n: cut(n, t) for n, t in net.state_dict().items()}, os.path.join(sys.argv[-1], f"rank{me}.pt"))
if parts > 1:
    dist.destroy_process_group()
