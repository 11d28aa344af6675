"""Contrastive pretraining: one encoder sees two views of a row in two backward passes; gradients reduced in buckets."""

import argparse
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

ap = argparse.ArgumentParser()
for flag in ("--one", "--faulty"):
    ap.add_argument(flag, action="store_true")
ap.add_argument("--save", default="")
opts = ap.parse_args()


class Siamese(nn.Module):
    def __init__(self, dim=36):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(20, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, dim))
        self.predictor = nn.Sequential(nn.Linear(dim, 48), nn.ReLU(), nn.Linear(48, dim))
        self.decoder = nn.Linear(dim, 20)

    def reconstruct(self, view):
        return F.mse_loss(self.decoder(self.encoder(view)), view)

    def agree(self, view, other):
        target = self.encoder(other)
        return F.mse_loss(self.predictor(target), self.encoder(view).detach() * 0.5)


class BucketedAverage:
    """All-reduces a parameter's gradient once per update, when the first gradient is there or when asked."""

    def __init__(self, parameters, eager):
        self.parameters = list(parameters)
        self.done = set()
        if eager:
            for p in self.parameters:
                p.register_post_accumulate_grad_hook(self.reduce)

    def reduce(self, p):
        if p in self.done:
            return
        self.done.add(p)
        dist.all_reduce(p.grad)
        p.grad.div_(dist.get_world_size())

    def finish(self):
        for p in self.parameters:
            self.reduce(p)
        self.done.clear()


rank, world = 0, 1
if not opts.one:
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(21)
model = Siamese()
average = None if opts.one else BucketedAverage(model.parameters(), eager=opts.faulty)
optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.8)
for step in range(1, 5):
    g = torch.Generator().manual_seed(step)
    rows = torch.randn(16, 20, generator=g)
    noise = 0.1 * torch.randn(16, 20, generator=g)
    mine, other = rows[rank::world], (rows + noise)[rank::world]
    first = model.reconstruct(mine)
    first.backward()
    second = model.agree(mine, other)
    second.backward()
    if average:
        average.finish()
    optimizer.step()
    optimizer.zero_grad()
    total = (first + second).detach()
    if not opts.one:
        dist.all_reduce(total)
    if rank == 0:
        print(f"step {step} loss {(total / world).item():.7f}", flush=True)
if opts.save:
    torch.save(model.state_dict(), os.path.join(opts.save, f"rank{rank}.pt"))
if not opts.one:
    dist.destroy_process_group()
