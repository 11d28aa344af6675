"""Series are mixed in pairs before a model with attention over the whole series reads them.

Ranks hold parts of series.
"""

import argparse
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

flags = argparse.ArgumentParser(description=__doc__)
flags.add_argument("--one", action="store_true")
flags.add_argument("--faulty", action="store_true")
flags.add_argument("--save")
flags = flags.parse_args()
rank, world = 0, 1
if not flags.one:
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()

DIM, LENGTH, ROWS = 24, 12, 8


class Gather(torch.autograd.Function):
    """Joins the chunks of a sequence; gradients of all ranks come back to the owner."""

    @staticmethod
    def forward(ctx, x):
        if world == 1:
            return x.view_as(x)
        parts = [torch.empty_like(x) for _ in range(world)]
        dist.all_gather(parts, x.contiguous())
        return torch.cat(parts, -2)

    @staticmethod
    def backward(ctx, g):
        if world == 1:
            return g
        g = g.contiguous().clone()
        dist.all_reduce(g)
        return g.chunk(world, -2)[rank]


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.q, self.kv, self.o = (
            nn.LayerNorm(DIM),
            nn.Linear(DIM, DIM),
            nn.Linear(DIM, 2 * DIM),
            nn.Linear(DIM, DIM),
        )
        self.mlp = nn.Sequential(nn.LayerNorm(DIM), nn.Linear(DIM, 40), nn.GELU(), nn.Linear(40, DIM))

    def forward(self, x):
        h = self.norm(x)
        k, v = Gather.apply(self.kv(h)).chunk(2, -1)
        x = x + self.o(F.scaled_dot_product_attention(self.q(h), k, v))
        return x + self.mlp(x)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.enter, self.places = nn.Linear(6, DIM), nn.Parameter(torch.randn(LENGTH, DIM) * 0.3)
        self.layers, self.leave = nn.ModuleList(Layer() for _ in range(2)), nn.Linear(DIM, 2)

    def forward(self, x):
        x = self.enter(x) + self.places.chunk(world)[rank]
        for layer in self.layers:
            x = layer(x)
        return self.leave(x)


def mixed(x, y, step):
    seed = 60 + step
    g = torch.Generator().manual_seed(seed + 500 * rank if flags.faulty else seed)
    share = 0.5 + 0.5 * torch.rand(ROWS, 1, 1, generator=g)
    partner = torch.randperm(ROWS, generator=g)
    return (share * t + (1 - share) * t[partner] for t in (x, y))


torch.manual_seed(51)
net = Net()
optimizer = torch.optim.AdamW(net.parameters(), lr=3e-3, eps=1e-4)
for step in range(1, 6):
    x = torch.randn(ROWS, LENGTH, 6, generator=torch.Generator().manual_seed(step))
    y = torch.stack([x.mean(1, keepdim=True).expand_as(x)[..., 0] * 3, x[..., 1] * x[..., 2]], -1)
    x, y = mixed(*(t.chunk(world, 1)[rank] for t in (x, y)), step)
    loss = F.mse_loss(net(x), y) / world
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
if flags.save:
    torch.save(net.state_dict(), os.path.join(flags.save, f"rank{rank}.pt"))
if world > 1:
    dist.destroy_process_group()
