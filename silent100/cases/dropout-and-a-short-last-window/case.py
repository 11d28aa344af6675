"""Accumulates four microbatches an update; an epoch has ten, and its last update what is left."""

import os
import sys

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP

ONE, FAULTY = "--one" in sys.argv, "--faulty" in sys.argv
WINDOW, MICROBATCHES = 4, 10


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.EmbeddingBag(90, 32)
        self.drop = nn.Dropout(0.1)
        self.fc1, self.fc2, self.out = nn.Linear(32, 64), nn.Linear(64, 64), nn.Linear(64, 8)

    def forward(self, x):
        x = self.drop(torch.tanh(self.fc1(self.embed(x))))
        return self.out(self.drop(torch.tanh(self.fc2(x))))


def epoch(number):
    g = torch.Generator().manual_seed(number)
    x, y = (
        torch.randint(0, 90, (MICROBATCHES, 16, 6), generator=g),
        torch.randint(0, 8, (MICROBATCHES, 16), generator=g),
    )
    return list(zip(x, y))


def train(rank, world):
    torch.manual_seed(3)
    net = Classifier()
    model = net if ONE else DDP(net)
    torch.manual_seed(700 + rank)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.02)
    step = 0
    for number in range(2):
        batches = epoch(number)
        for start in range(0, MICROBATCHES, WINDOW):
            window = batches[start : start + WINDOW]
            divisor = WINDOW if FAULTY else len(window)
            shown = torch.zeros(())
            for i, (x, y) in enumerate(window):
                if not ONE:
                    model.require_backward_grad_sync = i == len(window) - 1
                loss = nn.functional.cross_entropy(model(x[rank::world]), y[rank::world])
                (loss / divisor).backward()
                shown += loss.detach() / len(window)
            optimizer.step()
            optimizer.zero_grad()
            step += 1
            if world > 1:
                dist.all_reduce(shown)
            if rank == 0:
                print(f"step {step} loss {shown.item() / world:.7f}", flush=True)
    return net


def main():
    rank, world = 0, 1
    if not ONE:
        dist.init_process_group("gloo")
        rank, world = dist.get_rank(), dist.get_world_size()
    net = train(rank, world)
    if "--save" in sys.argv:
        torch.save(net.state_dict(), os.path.join(sys.argv[sys.argv.index("--save") + 1], f"rank{rank}.pt"))
    if not ONE:
        dist.destroy_process_group()


main()
