"""Segmentation with a small U-shaped net; the overlap is counted over the batch."""

import os
import sys

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

ONE, FAULTY = "--one" in sys.argv, "--faulty" in sys.argv


def double(a, b):
    return nn.Sequential(
        nn.Conv2d(a, b, 3, padding=1), nn.LeakyReLU(0.1), nn.Conv2d(b, b, 3, padding=1), nn.LeakyReLU(0.1)
    )


class UNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.down, self.low, self.up = double(1, 6), double(6, 12), double(18, 6)
        self.last = nn.Conv2d(6, 3, 1)

    def forward(self, x):
        a = self.down(x)
        b = F.interpolate(self.low(F.max_pool2d(a, 2)), scale_factor=2)
        return self.last(self.up(torch.cat([a, b], 1)))


class SumOverRanks(torch.autograd.Function):
    @staticmethod
    def forward(ctx, t):
        t = t.clone()
        dist.all_reduce(t)
        return t

    @staticmethod
    def backward(ctx, grad):
        return grad


def overlap(p, y, several):
    sums = torch.stack([(p * y).sum((0, 2, 3)), p.sum((0, 2, 3)), y.sum((0, 2, 3))])
    if several:
        sums = SumOverRanks.apply(sums)
    inter, a, b = sums
    return 1 - ((2 * inter + 1) / (a + b + 1)).mean()


def pictures(step):
    g = torch.Generator().manual_seed(step)
    x = F.interpolate(torch.randn(6, 1, 4, 4, generator=g), size=(16, 16), mode="bicubic")
    x = x + torch.linspace(-1.0, 1.0, 6).view(6, 1, 1, 1)
    label = (x[:, 0] > 0.2).long() + (x[:, 0] > 1.0).long()
    return x + 0.2 * torch.randn(6, 1, 16, 16, generator=g), F.one_hot(label, 3).movedim(-1, 1).float()


rank, world = 0, 1
if not ONE:
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(44)
net = UNet()
optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.95, nesterov=True)
together = world > 1 and not FAULTY
for step in range(1, 5):
    x, y = (t.chunk(world)[rank] for t in pictures(step))
    logits = net(x)
    dice = overlap(logits.softmax(1), y, together)
    entropy = F.cross_entropy(logits, y) / world
    loss = entropy + (dice if together else dice / world)
    optimizer.zero_grad()
    loss.backward()
    shown = entropy.detach() + dice.detach() / world
    if world > 1:
        for t in [p.grad for p in net.parameters()] + [shown]:
            dist.all_reduce(t)
    optimizer.step()
    if rank == 0:
        print(f"step {step} loss {shown.item():.7f}", flush=True)
if "--save" in sys.argv:
    torch.save(net.state_dict(), os.path.join(sys.argv[sys.argv.index("--save") + 1], f"rank{rank}.pt"))
if world > 1:
    dist.destroy_process_group()
