"""Contrast against a queue of old keys; both views of a picture get noise that each rank draws for itself."""

import argparse
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel

cli = argparse.ArgumentParser()
cli.add_argument("--one", action="store_true")
cli.add_argument("--faulty", action="store_true")
cli.add_argument("--save")
args = cli.parse_args()
ROWS, LENGTH, DIM = 32, 96, 12


def encoder():
    return nn.Sequential(
        nn.Conv1d(2, 16, 3, padding=1),
        nn.ReLU(),
        nn.Conv1d(16, 16, 3, stride=2),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(64, DIM),
    )


def gathered(x):
    if args.one:
        return x
    parts = [torch.empty_like(x) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, x.contiguous())
    return torch.cat(parts)


class Contrast(nn.Module):
    def __init__(self):
        super().__init__()
        self.query, self.key = encoder(), encoder()
        self.key.load_state_dict(self.query.state_dict())
        self.key.requires_grad_(False)
        g = torch.Generator().manual_seed(8)
        with torch.no_grad():
            first = self.key(torch.randn(LENGTH, 2, 10, generator=g))
        self.register_buffer("queue", F.normalize(first, dim=1))

    @torch.no_grad()
    def push(self, keys):
        self.queue.copy_(torch.cat([self.queue[len(keys) :], keys]))

    def forward(self, a, b):
        q = F.normalize(self.query(a), dim=1)
        with torch.no_grad():
            for mine, other in zip(self.key.parameters(), self.query.parameters()):
                mine.lerp_(other, 0.05)
            k = F.normalize(self.key(b), dim=1)
        logits = torch.cat([(q * k).sum(1, keepdim=True), q @ self.queue.clone().T], 1) / 0.5
        loss = F.cross_entropy(logits, torch.zeros(len(q), dtype=torch.long))
        self.push(k if args.faulty else gathered(k))
        return loss


rank, world = 0, 1
if not args.one:
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(1911)
contrast = Contrast()
model = contrast if args.one else DistributedDataParallel(contrast, broadcast_buffers=False)
sgd = torch.optim.SGD(contrast.query.parameters(), lr=0.02, momentum=0.9, weight_decay=1e-3)
own = torch.Generator().manual_seed(19110 + rank)
for step in range(1, 6):
    rows = torch.randn(ROWS, 2, 10, generator=torch.Generator().manual_seed(step)).chunk(world)[rank]
    a, b = (rows + 0.2 * torch.randn(rows.shape, generator=own) for _ in range(2))
    loss = model(a, b)
    sgd.zero_grad()
    loss.backward()
    sgd.step()
    shown = loss.detach().clone()
    if world > 1:
        dist.all_reduce(shown)
    if rank == 0:
        print(f"step {step} loss {shown.item() / world:.7f}", flush=True)
if args.save:
    torch.save(contrast.state_dict(), os.path.join(args.save, f"rank{rank}.pt"))
if not args.one:
    dist.destroy_process_group()
