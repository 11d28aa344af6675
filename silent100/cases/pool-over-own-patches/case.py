"""A picture's patches are shared out over ranks; blocks mix them through means of all, a pooled feature is scored."""

import argparse
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

cli = argparse.ArgumentParser()
cli.add_argument("--one", action="store_true")
cli.add_argument("--faulty", action="store_true")
cli.add_argument("--save")
args = cli.parse_args()
rank, world = 0, 1
if not args.one:
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()


class MeanOfRanks(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        x = x.contiguous().clone()
        dist.all_reduce(x)
        return x / world

    @staticmethod
    def backward(ctx, g):
        g = g.contiguous().clone()
        dist.all_reduce(g)
        return g / world


class Pool(nn.Module):
    """The mean over a picture's patches."""

    def __init__(self, shared=True):
        super().__init__()
        self.shared = shared and world > 1

    def forward(self, x):
        x = x.mean(1)
        return MeanOfRanks.apply(x) if self.shared else x


class Mix(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.norm, self.mean = nn.LayerNorm(d), Pool()
        self.own, self.all, self.out = nn.Linear(d, 2 * d), nn.Linear(d, 2 * d, bias=False), nn.Linear(2 * d, d)

    def forward(self, x):
        h = self.norm(x)
        return x + self.out(F.gelu(self.own(h) + self.all(self.mean(h))[:, None]))


class Vit(nn.Module):
    def __init__(self, d=24, side=4):
        super().__init__()
        self.side = side
        self.patch, self.place = nn.Linear(3 * side * side, d), nn.Parameter(torch.randn(16, d) * 0.1)
        self.mixes, self.norm = nn.ModuleList([Mix(d) for _ in range(3)]), nn.LayerNorm(d)
        self.pool, self.head = Pool(shared=not args.faulty), nn.Linear(d, 9)

    def forward(self, pictures):
        patches = F.unfold(pictures, self.side, stride=self.side).transpose(1, 2).chunk(world, 1)[rank]
        x = self.patch(patches) + self.place.chunk(world)[rank]
        for mix in self.mixes:
            x = mix(x)
        return self.head(self.pool(self.norm(x)))


torch.manual_seed(16)
vit = Vit()
opt = torch.optim.AdamW(vit.parameters(), lr=2e-3, eps=1e-3)
for step in range(1, 6):
    g = torch.Generator().manual_seed(step)
    pictures, labels = torch.randn(12, 3, 16, 16, generator=g), torch.randint(0, 9, (12,), generator=g)
    loss = F.cross_entropy(vit(pictures), labels) / world
    opt.zero_grad()
    loss.backward()
    loss = loss.detach()
    if world > 1:
        for p in vit.parameters():
            dist.all_reduce(p.grad)
        dist.all_reduce(loss)
    opt.step()
    if rank == 0:
        print(f"step {step} loss {loss.item():.7f}", flush=True)
if args.save:
    torch.save(vit.state_dict(), os.path.join(args.save, f"rank{rank}.pt"))
if world > 1:
    dist.destroy_process_group()
