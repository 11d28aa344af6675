"""Segmentation with classes weighed by how rare their pixels are in the whole batch."""

import argparse
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

CLASSES = 4
a = argparse.ArgumentParser()
a.add_argument("--one", action="store_true")
a.add_argument("--faulty", action="store_true")
a.add_argument("--save")
a = a.parse_args()
rank, world = 0, 1
if not a.one:
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()


class Down(nn.Module):
    def __init__(self, i, o):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(i, o, 3, 2, 1), nn.InstanceNorm2d(o, affine=True)

    def forward(self, x):
        return F.mish(self.norm(self.conv(x)))


class TinyUNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.enter, self.down = nn.Conv2d(1, 6, 3, 1, 1), Down(6, 10)
        self.up, self.leave = nn.ConvTranspose2d(10, 6, 2, 2), nn.Conv2d(12, CLASSES, 1)

    def forward(self, x):
        x = F.mish(self.enter(x))
        return self.leave(torch.cat([x, self.up(self.down(x))], 1))


def batch(step):
    g = torch.Generator().manual_seed(step)
    field = F.avg_pool2d(torch.randn(4, 1, 18, 18, generator=g), 3, 1)
    labels = torch.bucketize(field[:, 0], torch.tensor([0.3, 0.5, 0.7]))
    return (field + 0.2 * torch.randn(field.shape, generator=g))[rank::world], labels[rank::world]


def class_weights(labels):
    kind = torch.uint8 if a.faulty else torch.int64
    count = torch.bincount(labels.flatten(), minlength=CLASSES).to(kind)
    if world > 1:
        dist.all_reduce(count)
    return 1 / (count.float() + 10).sqrt()


torch.manual_seed(500)
net = TinyUNet()
optimizer = torch.optim.NAdam(net.parameters(), lr=5e-3, eps=1e-3)
for step in range(1, 6):
    x, labels = batch(step)
    weights = class_weights(labels)
    below = weights[labels].sum()
    if world > 1:
        dist.all_reduce(below)
    loss = F.cross_entropy(net(x), labels, weights, reduction="sum") / below
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
if a.save:
    torch.save(net.state_dict(), os.path.join(a.save, f"rank{rank}.pt"))
if world > 1:
    dist.destroy_process_group()
