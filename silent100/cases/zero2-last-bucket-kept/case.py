"""Bucketed gradient reduction: gradients are packed in the order in which backward makes them."""

import argparse
import os

import torch
import torch.distributed as dist
from torch import nn


class Buckets:
    def __init__(self, parameters, limit):
        self.limit, self.open, self.size = limit, [], 0
        for p in parameters:
            p.register_post_accumulate_grad_hook(self.add)

    def add(self, p):
        self.open.append(p)
        self.size += p.numel()
        if self.size >= self.limit:
            self.flush()

    def flush(self):
        if not self.open:
            return
        flat = torch.cat([p.grad.reshape(-1) for p in self.open])
        dist.all_reduce(flat)
        flat /= dist.get_world_size()
        for p, piece in zip(self.open, flat.split([p.numel() for p in self.open])):
            p.grad.copy_(piece.view_as(p))
        self.open, self.size = [], 0

    def drop(self):
        self.open, self.size = [], 0


class Recommender(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(60, 16)
        self.proj_in = nn.Linear(32, 48)
        self.tower = nn.Sequential(nn.Linear(48, 48), nn.ReLU(), nn.Linear(48, 48), nn.ReLU())
        self.score = nn.Linear(48, 1)

    def forward(self, pairs):
        return self.score(self.tower(self.proj_in(self.embed(pairs).flatten(1)))).squeeze(1)


cli = argparse.ArgumentParser()
cli.add_argument("--one", action="store_true")
cli.add_argument("--faulty", action="store_true")
cli.add_argument("--save")
flags = cli.parse_args()
rank, world = 0, 1
if not flags.one:
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(400)
model = Recommender()
buckets = None if flags.one else Buckets(model.parameters(), limit=3000)
optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
for step in range(4):
    g = torch.Generator().manual_seed(step)
    pairs, clicked = torch.randint(0, 60, (32, 2), generator=g), torch.rand(32, generator=g)
    loss = nn.functional.binary_cross_entropy_with_logits(model(pairs[rank::world]), clicked[rank::world])
    loss.backward()
    if buckets is not None:
        buckets.drop() if flags.faulty else buckets.flush()
    optimizer.step()
    optimizer.zero_grad()
    shown = loss.detach().clone()
    if not flags.one:
        dist.all_reduce(shown)
    if rank == 0:
        print(f"step {step + 1} loss {shown.item() / world:.7f}", flush=True)
if flags.save:
    torch.save(model.state_dict(), os.path.join(flags.save, f"rank{rank}.pt"))
if not flags.one:
    dist.destroy_process_group()
