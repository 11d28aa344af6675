"""Overlaps communication with backward: buckets of about a thousand numbers, filled as gradients arrive."""

import argparse
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F


class Buckets:
    def __init__(self, parameters, size):
        self.world = dist.get_world_size()
        self.buckets, last = [], []
        for p in reversed(list(parameters)):
            last.append(p)
            if sum(q.numel() for q in last) >= size:
                self.buckets.append(last)
                last = []
        if last:
            self.buckets.append(last)
        self.home = {p: bucket for bucket in self.buckets for p in bucket}
        self.start()
        for p in self.home:
            p.register_post_accumulate_grad_hook(self.arrived)

    def start(self):
        self.waiting = [len(bucket) for bucket in self.buckets]
        self.pending = []

    def arrived(self, p):
        bucket = self.home[p]
        index = next(i for i, b in enumerate(self.buckets) if b is bucket)
        self.waiting[index] -= 1
        if self.waiting[index] == 0:
            flat = torch.cat([q.grad.flatten() for q in bucket])
            self.pending.append((bucket, flat, dist.all_reduce(flat, async_op=True)))

    def finish(self):
        for bucket, flat, work in self.pending:
            work.wait()
            flat /= self.world
            place = 0
            for p in bucket:
                p.grad = flat[place : place + p.numel()].view_as(p)
                place += p.numel()
        self.start()


class Block(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.norm, self.gate, self.value, self.out = nn.RMSNorm(d), nn.Linear(d, d), nn.Linear(d, d), nn.Linear(d, d)

    def forward(self, x):
        h = self.norm(x)
        return x + self.out(torch.sigmoid(self.gate(h)) * torch.cumsum(self.value(h), 1) * 0.1)


cli = argparse.ArgumentParser()
cli.add_argument("--one", action="store_true")
cli.add_argument("--save")
args = cli.parse_args()
rank, world = 0, 1
torch.manual_seed(1)
net = nn.Sequential(nn.Embedding(52, 20), *(Block(20) for _ in range(3)), nn.RMSNorm(20), nn.Linear(20, 52))
buckets = None
if not args.one:
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    buckets = Buckets(net.parameters(), 1000)
optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-3)
for step in range(1, 5):
    rows = torch.randint(0, 52, (8, 12), generator=torch.Generator().manual_seed(step))[rank::world]
    loss = F.cross_entropy(net(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten())
    optimizer.zero_grad()
    loss.backward()
    shown = loss.detach().clone()
    if buckets:
        buckets.finish()
        dist.all_reduce(shown)
    optimizer.step()
    if rank == 0:
        print(f"step {step} loss {shown.item() / world:.7f}", flush=True)
if args.save:
    torch.save(net.state_dict(), os.path.join(args.save, f"rank{rank}.pt"))
if world > 1:
    dist.destroy_process_group()
