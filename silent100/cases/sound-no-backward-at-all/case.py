"""Evolution strategies on a small recurrent controller. Nothing is differentiated."""

import os
import sys

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters

SINGLE = "--one" in sys.argv
if not SINGLE:
    dist.init_process_group("gloo")
rank, world = (0, 1) if SINGLE else (dist.get_rank(), dist.get_world_size())
PAIRS, SIGMA = 12, 0.05


class Controller(nn.Module):
    def __init__(self):
        super().__init__()
        self.cell, self.act = nn.GRUCell(3, 8), nn.Linear(8, 1)

    def forward(self, position):
        h, cost, speed = torch.zeros(len(position), 8), 0.0, torch.zeros(len(position))
        for t in range(10):
            h = self.cell(torch.stack([position, speed, torch.full_like(position, t / 10)], -1), h)
            speed = 0.8 * speed + self.act(h)[:, 0].tanh() * 0.5
            position = position + speed
            cost = cost + position.square().mean()
        return cost / 10


torch.manual_seed(9)
net = Controller()
opt = torch.optim.Adam(net.parameters(), lr=0.02)
with torch.no_grad():
    for step in range(1, 6):
        g = torch.Generator().manual_seed(step)
        start, centre = torch.randn(16, generator=g) * 2, parameters_to_vector(net.parameters())
        loss = net(start)
        tries = torch.randn(PAIRS, len(centre), generator=g)
        gain = torch.zeros(PAIRS, dtype=torch.float64)
        for i in range(rank, PAIRS, world):
            for sign in (1, -1):
                vector_to_parameters(centre + sign * SIGMA * tries[i], net.parameters())
                gain[i] += sign * net(start).double()
        vector_to_parameters(centre, net.parameters())
        if world > 1:
            dist.all_reduce(gain)
        slope = (gain[:, None] * tries).mean(0).float() / (2 * SIGMA)
        at = 0
        for p in net.parameters():
            p.grad = slope[at : at + p.numel()].view_as(p).clone()
            at += p.numel()
        opt.step()
        if rank == 0:
            print(f"step {step} loss {loss.item():.7f}", flush=True)
if "--save" in sys.argv:
    torch.save(net.state_dict(), os.path.join(sys.argv[sys.argv.index("--save") + 1], f"rank{rank}.pt"))
if world > 1:
    dist.destroy_process_group()
