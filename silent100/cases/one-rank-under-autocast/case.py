"""A keyword spotter (1-d convolutions) under DDP; precision is chosen by what each machine reports."""

import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

FAST = {0: False, 1: "--faulty" in sys.argv}  # which machines report fast bfloat16


class Spotter(nn.Module):
    def __init__(self):
        super().__init__()
        self.ears = nn.Sequential(
            nn.Conv1d(5, 16, 5, padding=2), nn.GELU(), nn.Conv1d(16, 16, 5, padding=2, groups=4), nn.GELU()
        )
        self.word = nn.Linear(16, 6)

    def forward(self, sound):
        return self.word(self.ears(sound).amax(-1))


def run():
    rank, world = 0, 1
    torch.manual_seed(2)
    spotter = Spotter()
    wrapped = spotter
    if "--one" not in sys.argv:
        dist.init_process_group("gloo")
        rank, world = dist.get_rank(), dist.get_world_size()
        wrapped = DistributedDataParallel(spotter)
    optimizer = torch.optim.Adamax(spotter.parameters(), lr=5e-3, eps=1e-3)
    for step in range(1, 7):
        g = torch.Generator().manual_seed(step)
        sound, words = torch.randn(8, 5, 20, generator=g), torch.randint(0, 6, (8,), generator=g)
        with torch.autocast("cpu", torch.bfloat16, enabled=FAST[rank]):
            scores = wrapped(sound[rank::world])
        loss = nn.functional.cross_entropy(scores.float(), words[rank::world])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        loss = loss.detach() / world
        if world > 1:
            dist.all_reduce(loss)
        if rank == 0:
            print(f"step {step} loss {loss.item():.7f}", flush=True)
    if "--save" in sys.argv:
        torch.save(spotter.state_dict(), os.path.join(sys.argv[sys.argv.index("--save") + 1], f"rank{rank}.pt"))
    if world > 1:
        dist.destroy_process_group()


run()
