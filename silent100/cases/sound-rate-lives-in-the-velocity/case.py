"""Momentum in two manners: v = mu v + g, w -= lr v; or v = mu v - lr g, w += v."""

import os
import sys

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

ONE = "--one" in sys.argv
LR, MU = 0.08, 0.9
rank, world = 0, 1
if not ONE:
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(2, 12, 3, stride=2), nn.Conv2d(12, 12, 3)
        self.norm, self.head = nn.GroupNorm(4, 12), nn.Linear(12, 6)

    def forward(self, x):
        x = F.relu(self.conv1(x))
        return self.head(F.relu(self.norm(self.conv2(x))).mean((2, 3)))


@torch.no_grad()
def update(parameters, velocity):
    for p, v in zip(parameters, velocity):
        if ONE:
            v.mul_(MU).add_(p.grad)
            p.sub_(LR * v)
        else:
            dist.all_reduce(p.grad)
            v.mul_(MU).sub_(p.grad, alpha=LR / world)
            p.add_(v)
        p.grad = None


torch.manual_seed(13)
net = Net()
velocity = [torch.zeros_like(p) for p in net.parameters()]
for step in range(1, 6):
    g = torch.Generator().manual_seed(step)
    x, y = torch.randn(12, 2, 9, 9, generator=g), torch.randint(0, 6, (12,), generator=g)
    loss = F.cross_entropy(net(x[rank::world]), y[rank::world])
    loss.backward()
    update(list(net.parameters()), velocity)
    shown = loss.detach().clone()
    if world > 1:
        dist.all_reduce(shown)
    if rank == 0:
        print(f"step {step} loss {shown.item() / world:.7f}", flush=True)
if "--save" in sys.argv:
    torch.save(net.state_dict(), os.path.join(sys.argv[sys.argv.index("--save") + 1], f"rank{rank}.pt"))
if not ONE:
    dist.destroy_process_group()
