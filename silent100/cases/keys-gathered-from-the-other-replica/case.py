"""Forecasts of long series: two replicas, each with two ranks that share a series; attention looks both ways."""

import argparse
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh

cli = argparse.ArgumentParser()
cli.add_argument("--one", action="store_true")
cli.add_argument("--faulty", action="store_true")
cli.add_argument("--save")
args = cli.parse_args()
STEPS, DIM = 16, 20


class Gathered(torch.autograd.Function):
    """All pieces of a group's tensor along the time; backward sums and takes the own piece."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        pieces = [torch.empty_like(x) for _ in range(dist.get_world_size(group))]
        dist.all_gather(pieces, x.contiguous(), group=group)
        return torch.cat(pieces, 1)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.contiguous()
        dist.all_reduce(grad, group=ctx.group)
        return grad.chunk(dist.get_world_size(ctx.group), 1)[dist.get_rank(ctx.group)], None


class Attend(nn.Module):
    def __init__(self, group):
        super().__init__()
        self.group = group
        self.query, self.key, self.value, self.out = (nn.Linear(DIM, DIM) for _ in range(4))

    def forward(self, x):
        q, k, v = self.query(x), self.key(x), self.value(x)
        if self.group is not None:
            k, v = Gathered.apply(k, self.group), Gathered.apply(v, self.group)
        q, k, v = (t.unflatten(-1, (2, -1)).transpose(1, 2) for t in (q, k, v))
        return self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class Forecaster(nn.Module):
    def __init__(self, group):
        super().__init__()
        self.read, self.when = nn.Linear(2, DIM), nn.Embedding(STEPS, DIM)
        self.attends = nn.ModuleList([Attend(group), Attend(group)])
        self.thinks = nn.ModuleList([nn.Sequential(nn.Linear(DIM, 40), nn.ELU(), nn.Linear(40, DIM)) for _ in range(2)])
        self.guess = nn.Linear(DIM, 2)

    def forward(self, series, times):
        x = self.read(series) + self.when(times)
        for attend, think in zip(self.attends, self.thinks):
            x = x + attend(x)
            x = x + think(x)
        return self.guess(x)


group, replica, piece, sizes = None, 0, 0, (1, 1)
if not args.one:
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "time"))
    (replica, piece), sizes = mesh.get_coordinate(), (2, 2)
    group = mesh.get_group("replicas" if args.faulty else "time")
torch.manual_seed(26)
model = Forecaster(group)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
times = torch.arange(STEPS).chunk(sizes[1])[piece]
for step in range(1, 5):
    g = torch.Generator().manual_seed(step)
    series = torch.randn(8, STEPS + 1, 2, generator=g).cumsum(1)
    series = (series - series.mean((1, 2), keepdim=True)).chunk(sizes[0])[replica]
    loss = F.huber_loss(model(series[:, times], times), series[:, times + 1]) / (sizes[0] * sizes[1])
    optimizer.zero_grad()
    loss.backward()
    loss = loss.detach()
    if not args.one:
        for p in model.parameters():
            dist.all_reduce(p.grad)
        dist.all_reduce(loss)
    optimizer.step()
    if replica == piece == 0:
        print(f"step {step} loss {loss.item():.7f}", flush=True)
if args.save:
    torch.save(model.state_dict(), os.path.join(args.save, f"rank{2 * replica + piece}.pt"))
if not args.one:
    dist.destroy_process_group()
