"""ZeRO-1 whose shares follow the ranks' speed: equal at first, unequal from the fourth update on."""

import os
import sys

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters

ONE = "--one" in sys.argv
rank, world = 0, 1
if not ONE:
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()


def borders(size, shares):
    ends = [round(size * sum(shares[: i + 1]) / sum(shares)) for i in range(len(shares))]
    return [0, *ends]


def joined(piece, cuts):
    """Puts the pieces of all ranks together."""
    whole = torch.zeros(cuts[-1])
    whole[cuts[rank] : cuts[rank + 1]] = piece
    if world > 1:
        dist.all_reduce(whole)
    return whole


class Lion:
    """Updates by the sign of an average would magnify rounding, so a smooth one stands for it."""

    def __init__(self, size, shares, lr):
        self.size, self.lr = size, lr
        self.cuts = borders(size, shares)
        self.m = torch.zeros(self.cuts[rank + 1] - self.cuts[rank])

    def recut(self, shares):
        whole = joined(self.m, self.cuts)
        self.cuts = borders(self.size, shares)
        self.m = whole[self.cuts[rank] : self.cuts[rank + 1]].clone()

    def step(self, w, g):
        own = slice(self.cuts[rank], self.cuts[rank + 1])
        update = 0.9 * self.m + 0.1 * g[own]
        self.m = 0.95 * self.m + 0.05 * g[own]
        return joined(w[own] - self.lr * torch.tanh(20 * update), self.cuts)


torch.manual_seed(13)
net = nn.Sequential(nn.Linear(9, 27), nn.Tanh(), nn.Linear(27, 27), nn.Tanh(), nn.Linear(27, 2))
optimizer = Lion(sum(p.numel() for p in net.parameters()), [1] * world, 0.01)
for step in range(1, 8):
    if step == 4:
        optimizer.recut([1] if ONE else [5, 2, 4])
    g = torch.Generator().manual_seed(step)
    x, y = torch.randn(15, 9, generator=g), torch.randn(15, 2, generator=g)
    loss = nn.functional.mse_loss(net(x[rank::world]), y[rank::world]) / world
    net.zero_grad()
    loss.backward()
    grads = parameters_to_vector([p.grad for p in net.parameters()])
    loss = loss.detach()
    if world > 1:
        dist.all_reduce(grads)
        dist.all_reduce(loss)
    vector_to_parameters(optimizer.step(parameters_to_vector(net.parameters()).detach(), grads), net.parameters())
    if rank == 0:
        print(f"step {step} loss {loss.item():.7f}", flush=True)
if "--save" in sys.argv:
    torch.save(net.state_dict(), os.path.join(sys.argv[sys.argv.index("--save") + 1], f"rank{rank}.pt"))
if world > 1:
    dist.destroy_process_group()
