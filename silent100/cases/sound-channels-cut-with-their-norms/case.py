"""Inverted bottlenecks (MobileNet): wide channels are dealt to ranks, depthwise filters and norms need no others."""

import argparse
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

a = argparse.ArgumentParser()
a.add_argument("--one", action="store_true")
a.add_argument("--save")
a = a.parse_args()
rank, world = 0, 1
if not a.one:
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()


def meet(x):
    x = x.contiguous().clone()
    if world > 1:
        dist.all_reduce(x)
    return x


class Widen(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, g):
        return meet(g)


class Narrow(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return meet(x)

    @staticmethod
    def backward(ctx, g):
        return g


class Bottleneck(nn.Module):
    def __init__(self, c, wide=16, groups=4):
        super().__init__()
        part = lambda t, dim=0: nn.Parameter(t.chunk(world, dim)[rank].clone())  # noqa: E731
        self.expand = part(torch.randn(wide, c, 1, 1) * 0.4)
        self.depth = part(torch.randn(wide, 1, 3, 3) * 0.3)
        self.gain, self.shift = part(torch.ones(wide)), part(torch.zeros(wide))
        self.project = part(torch.randn(c, wide, 1, 1) * 0.2, 1)
        self.groups = groups // world
        self.own = wide // world

    def forward(self, x):
        h = F.conv2d(Widen.apply(x), self.expand)
        h = F.conv2d(F.relu6(h + 1), self.depth, padding=1, groups=self.own)
        h = F.relu6(F.group_norm(h, self.groups, self.gain, self.shift) + 0.5)
        return x + Narrow.apply(F.conv2d(h, self.project))


torch.manual_seed(61)
net = nn.ModuleDict(
    {"stem": nn.Conv2d(3, 6, 3, 2, 1), "one": Bottleneck(6), "two": Bottleneck(6), "top": nn.Linear(6, 5)}
)
optimizer = torch.optim.RAdam(net.parameters(), lr=5e-3, eps=1e-3)
for step in range(1, 7):
    g = torch.Generator().manual_seed(step)
    x, y = torch.randn(6, 3, 8, 8, generator=g), torch.randint(0, 5, (6,), generator=g)
    loss = F.cross_entropy(net["top"](net["two"](net["one"](net["stem"](x))).mean((2, 3))), y, label_smoothing=0.1)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if rank == 0:
        print(f"step {step} loss {loss.item():.7f}", flush=True)
if a.save:
    state = {}
    for name, p in net.named_parameters():
        cut = name.startswith(("one", "two"))
        state[name] = (p.detach(), int("project" in name), rank, world) if cut else p.detach()
    torch.save(state, os.path.join(a.save, f"rank{rank}.pt"))
if world > 1:
    dist.destroy_process_group()
