"""A checkpoint has float64 differences in thirds, which rotated owners read; a normalizing flow."""

import argparse
import os

import torch
import torch.distributed as dist
import torch.nn as nn

ap = argparse.ArgumentParser()
ap.add_argument("--one", action="store_true")
ap.add_argument("--save")
ap = ap.parse_args()
rank, world = 0, 1
if not ap.one:
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()


class Flow(nn.Module):
    """Affine couplings; a density of four-dimensional points."""

    def __init__(self):
        super().__init__()
        self.nets = nn.ModuleList(nn.Sequential(nn.Linear(2, 14), nn.Tanh(), nn.Linear(14, 4)) for _ in range(3))

    def forward(self, x):
        volume = 0.0
        for net in self.nets:
            a, b = x.chunk(2, 1)
            scale, shift = net(a).chunk(2, 1)
            scale = torch.tanh(scale)
            x, volume = torch.cat([b * scale.exp() + shift, a], 1), volume + scale.sum(1)
        return 0.5 * x.square().sum(1) - volume


class Sums:
    """Flat weights with a momentum, of which a rank keeps the piece that has its number."""

    def __init__(self, module, number):
        self.parameters, self.number = list(module.parameters()), number
        self.velocity = torch.zeros_like(self.piece(self.flat()))

    def flat(self):
        return nn.utils.parameters_to_vector(self.parameters).detach()

    def piece(self, flat):
        return nn.functional.pad(flat, (0, -len(flat) % world)).chunk(world)[self.number]

    def update(self, grad):
        self.velocity = 0.9 * self.velocity + self.piece(grad)
        self.put(self.piece(self.flat()) - 0.05 * self.velocity)

    def put(self, piece):
        whole = torch.zeros(world, len(piece))
        whole[self.number] = piece
        if world > 1:
            dist.all_reduce(whole)
        nn.utils.vector_to_parameters(whole.flatten()[: len(self.flat())], self.parameters)


def fresh():
    torch.manual_seed(53)
    return Flow()


def steps(flow, sums, first, last):
    for step in range(first, last + 1):
        g = torch.Generator().manual_seed(step)
        x = torch.randn(12, 4, generator=g).cumsum(1)[rank::world]
        loss = flow(x).sum() / 12
        flow.zero_grad()
        loss.backward()
        grad = torch.cat([p.grad.flatten() for p in flow.parameters()] + [loss.detach()[None]])
        if world > 1:
            dist.all_reduce(grad)
        sums.update(grad[:-1])
        if rank == 0:
            print(f"step {step} loss {grad[-1].item():.7f}", flush=True)


flow = fresh()
sums = Sums(flow, rank)
steps(flow, sums, 1, 3)
difference = sums.piece(sums.flat()).double() - sums.piece(nn.utils.parameters_to_vector(fresh().parameters())).double()
files = [(rank, difference.detach(), sums.velocity)]
if world > 1:
    files = [None] * world
    dist.all_gather_object(files, (rank, difference.detach(), sums.velocity))
number = (rank + 1) % world
flow = fresh()
sums = Sums(flow, number)
_, difference, sums.velocity = next(f for f in files if f[0] == number)
sums.put((sums.piece(sums.flat()).double() + difference).float())
steps(flow, sums, 4, 6)
if ap.save:
    torch.save(flow.state_dict(), os.path.join(ap.save, f"rank{rank}.pt"))
if world > 1:
    dist.destroy_process_group()
