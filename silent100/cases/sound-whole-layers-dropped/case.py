"""Stochastic depth in training, with every rank leaving out the same layers."""

import os
import random
import sys

import torch
import torch.distributed as dist
import torch.nn as nn


class DeepNet(nn.Module):
    def __init__(self, depth=6, width=22):
        super().__init__()
        self.first = nn.Linear(7, width)
        self.layers = nn.ModuleList(nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width)) for _ in range(depth))
        self.last = nn.Linear(width, 7)

    def forward(self, x, kept):
        x = self.first(x)
        for number, layer in enumerate(self.layers):
            if number in kept:
                x = x + torch.tanh(layer(x))
        return self.last(x)


def main(one, folder):
    rank, world = 0, 1
    if not one:
        dist.init_process_group("gloo")
        rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(6)
    net = DeepNet()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.2, momentum=0.9, weight_decay=0.01)
    coins = random.Random(321)
    for step in range(1, 7):
        kept = [i for i in range(6) if coins.random() > 0.4]
        x = torch.randn(10, 7, generator=torch.Generator().manual_seed(step))
        x = x.chunk(world)[rank]
        loss = (net(x, kept) - x.sin()).square().mean()
        optimizer.zero_grad()
        loss.backward()
        shown = loss.detach()
        if not one:
            used = [p for p in net.parameters() if p.grad is not None]
            for work in [dist.all_reduce(p.grad, async_op=True) for p in used]:
                work.wait()
            for p in used:
                p.grad.div_(world)
            dist.all_reduce(shown)
        optimizer.step()
        if rank == 0:
            print(f"step {step} loss {shown.item() / world:.7f}", flush=True)
    if folder:
        torch.save(net.state_dict(), os.path.join(folder, f"rank{rank}.pt"))
    if not one:
        dist.destroy_process_group()


main("--one" in sys.argv, sys.argv[sys.argv.index("--save") + 1] if "--save" in sys.argv else "")
