"""Distils a convolutional teacher, whose logits for the training set were computed once, into a smaller student."""

import argparse
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

cli = argparse.ArgumentParser()
cli.add_argument("--one", action="store_true")
cli.add_argument("--faulty", action="store_true")
cli.add_argument("--save")
args = cli.parse_args()
CLASSES, ROWS, BATCH = 6, 48, 12


def network(width):
    return nn.Sequential(
        nn.Conv2d(1, width, 3, stride=2, padding=1),
        nn.GroupNorm(2, width),
        nn.SiLU(),
        nn.Conv2d(width, width, 3, stride=2, padding=1),
        nn.SiLU(),
        nn.Flatten(),
        nn.Linear(width * 9, CLASSES),
    )


class Pictures(Dataset):
    def __init__(self):
        g = torch.Generator().manual_seed(5)
        self.x = torch.randn(ROWS, 1, 12, 12, generator=g)
        self.y = torch.randint(0, CLASSES, (ROWS,), generator=g)

    def __len__(self):
        return ROWS

    def __getitem__(self, i):
        return self.x[i], self.y[i], i


class Renumbered(Dataset):
    """A rank's part of the set; the number of a row is its place in here."""

    def __init__(self, rows, numbers):
        self.rows, self.numbers = rows, numbers

    def __len__(self):
        return len(self.numbers)

    def __getitem__(self, i):
        x, y, number = self.rows[self.numbers[i]]
        return x, y, i if args.faulty else number


rank, world = 0, 1
if not args.one:
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(1503)
teacher, student = network(12), network(4)
with torch.no_grad():
    logits = teacher(Pictures().x) * 4
# Ranks have halves of the set; one process takes its batches from both halves
halves = torch.arange(ROWS).view(2, -1, BATCH // 2)
numbers = (halves.transpose(0, 1) if args.one else halves[rank]).flatten().tolist()
loader = DataLoader(Renumbered(Pictures(), numbers), batch_size=BATCH // world)
model = student if args.one else DistributedDataParallel(student)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True)
for step, (x, y, number) in enumerate(loader, 1):
    said = model(x)
    soft = F.kl_div(
        F.log_softmax(said / 2, -1), F.log_softmax(logits[number] / 2, -1), reduction="batchmean", log_target=True
    )
    loss = 0.5 * F.cross_entropy(said, y) + 2 * soft
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    shown = loss.detach().clone()
    if world > 1:
        dist.all_reduce(shown)
    if rank == 0:
        print(f"step {step} loss {shown.item() / world:.7f}", flush=True)
if args.save:
    torch.save(student.state_dict(), os.path.join(args.save, f"rank{rank}.pt"))
if not args.one:
    dist.destroy_process_group()
