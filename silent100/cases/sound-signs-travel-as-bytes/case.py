"""A sign optimizer whose momentum lives with the owner of a tensor; the others get signs, one byte each."""

import argparse
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

cli = argparse.ArgumentParser()
cli.add_argument("--one", action="store_true")
cli.add_argument("--save")
args = cli.parse_args()
rank, world = 0, 1
if not args.one:
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()


class Signs:
    def __init__(self, parameters, lr, decay=0.02):
        self.parameters, self.lr, self.decay = list(parameters), lr, decay
        self.m = [torch.zeros_like(p) if i % world == rank else None for i, p in enumerate(self.parameters)]

    def direction(self, i, gradient):
        m = self.m[i]
        blend = 0.9 * m + 0.1 * gradient
        m.lerp_(gradient, 0.02)
        # Entries of nearly no size do not move
        return (blend.sign() * (blend.abs() > 1e-6)).to(torch.int8)

    @torch.no_grad()
    def step(self):
        for i, p in enumerate(self.parameters):
            owner = i % world
            if world > 1:
                dist.reduce(p.grad, owner)
            signs = torch.empty_like(p, dtype=torch.int8)
            if owner == rank:
                signs = self.direction(i, p.grad / world)
            if world > 1:
                dist.broadcast(signs, owner)
            p.mul_(1 - self.lr * self.decay).sub_(self.lr * signs)
            p.grad = None


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.inp, self.cell, self.out = nn.Linear(5, 18), nn.RNNCell(18, 18), nn.Linear(18, 5)

    def forward(self, x):
        h, said = torch.zeros(len(x), 18), []
        for t in range(x.shape[1]):
            h = self.cell(self.inp(x[:, t]), h)
            said.append(self.out(h))
        return torch.stack(said, 1)


torch.manual_seed(2302)
net = Net()
lion = Signs(net.parameters(), lr=2e-3)
for step in range(1, 5):
    x = torch.randn(16, 8, 5, generator=torch.Generator().manual_seed(step)).cumsum(1) / 2
    loss = F.mse_loss(net(x[rank::world, :-1]), x[rank::world, 1:])
    loss.backward()
    lion.step()
    shown = loss.detach().clone()
    if world > 1:
        dist.all_reduce(shown)
    if rank == 0:
        print(f"step {step} loss {shown.item() / world:.7f}", flush=True)
if args.save:
    torch.save(net.state_dict(), os.path.join(args.save, f"rank{rank}.pt"))
if not args.one:
    dist.destroy_process_group()
