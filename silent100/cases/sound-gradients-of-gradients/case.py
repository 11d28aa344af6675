"""A potential whose slope is fitted to forces: the loss is made of gradients."""

import os
import sys

import torch
import torch.distributed as dist
from torch import nn

ONE = "--one" in sys.argv


class Potential(nn.Module):
    """Energy of points in space, summed over pairs and points."""

    def __init__(self, width=24):
        super().__init__()
        self.pair = nn.Sequential(nn.Linear(6, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh())
        self.atom = nn.Linear(width, 1)
        self.centers = nn.Parameter(torch.linspace(0, 3, 6))

    def forward(self, x):
        away = (x[:, :, None] - x[:, None]).square().sum(-1) + 1e-3
        radial = torch.exp(-(away.sqrt()[..., None] - self.centers).square())
        return self.atom(self.pair(radial).sum(2)).sum((1, 2))

    def forces(self, x):
        x = x.requires_grad_()
        energy = self(x)
        return energy, -torch.autograd.grad(energy.sum(), x, create_graph=True)[0]


def frames(step, rows=8, points=5):
    x = torch.randn(rows, points, 3, generator=torch.Generator().manual_seed(step))
    return x, x.square().sum((1, 2)) / 2, -x


def main():
    rank, world = 0, 1
    if not ONE:
        dist.init_process_group("gloo")
        rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(92)
    model = Potential()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.002, momentum=0.9)
    for step in range(1, 6):
        x, energy, force = (t[rank::world] for t in frames(step))
        found, slope = model.forces(x.clone())
        loss = 0.01 * nn.functional.mse_loss(found, energy) + nn.functional.mse_loss(slope, force)
        optimizer.zero_grad()
        loss.backward()
        shown = loss.detach()
        if world > 1:
            for p in model.parameters():
                dist.all_reduce(p.grad)
                p.grad /= world
            dist.all_reduce(shown)
        optimizer.step()
        if rank == 0:
            print(f"step {step} loss {shown.item() / world:.7f}", flush=True)
    if "--save" in sys.argv:
        torch.save(model.state_dict(), os.path.join(sys.argv[sys.argv.index("--save") + 1], f"rank{rank}.pt"))
    if world > 1:
        dist.destroy_process_group()


main()
