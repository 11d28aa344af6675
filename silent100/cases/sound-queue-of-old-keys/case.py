"""Momentum contrast: queries learn, keys follow, and old keys are negatives."""

import copy
import os
import sys

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

ONE = "--one" in sys.argv


class MoCo(nn.Module):
    def __init__(self, size=32, d=10):
        super().__init__()
        self.query = nn.Sequential(nn.Linear(15, 40), nn.ReLU(), nn.Linear(40, d))
        self.key = copy.deepcopy(self.query).requires_grad_(False)
        self.register_buffer("queue", F.normalize(torch.randn(size, d), dim=1))
        self.register_buffer("at", torch.zeros(1, dtype=torch.long))

    @torch.no_grad()
    def follow(self):
        for mine, new in zip(self.key.parameters(), self.query.parameters()):
            mine.mul_(0.9).add_(new, alpha=0.1)

    @torch.no_grad()
    def remember(self, keys):
        if dist.is_initialized():
            parts = [torch.empty_like(keys) for _ in range(dist.get_world_size())]
            dist.all_gather(parts, keys.contiguous())
            keys = torch.cat(parts)
        at = int(self.at)
        self.queue[at : at + len(keys)] = keys
        self.at[0] = (at + len(keys)) % len(self.queue)

    def forward(self, a, b):
        q = F.normalize(self.query(a), dim=1)
        with torch.no_grad():
            k = F.normalize(self.key(b), dim=1)
        logits = torch.cat([(q * k).sum(1, keepdim=True), q @ self.queue.clone().T], 1) / 0.2
        return F.cross_entropy(logits, torch.zeros(len(q), dtype=torch.long)), k


rank, world = 0, 1
if not ONE:
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(2020)
moco = MoCo()
learnt = list(moco.query.parameters())
optimizer = torch.optim.SGD(learnt, lr=0.3, momentum=0.9)
for step in range(1, 7):
    g = torch.Generator().manual_seed(step)
    x = torch.randn(8, 15, generator=g)
    a, b = (x + 0.2 * torch.randn(8, 15, generator=g) for _ in range(2))
    loss, keys = moco(a.chunk(world)[rank], b.chunk(world)[rank])
    optimizer.zero_grad()
    loss.backward()
    loss = loss.detach()
    if not ONE:
        for p in learnt:
            dist.all_reduce(p.grad)
            p.grad /= world
        dist.all_reduce(loss)
    optimizer.step()
    moco.follow()
    moco.remember(keys)
    if rank == 0:
        print(f"step {step} loss {loss.item() / world:.7f}", flush=True)
if "--save" in sys.argv:
    torch.save(moco.state_dict(), os.path.join(sys.argv[sys.argv.index("--save") + 1], f"rank{rank}.pt"))
if not ONE:
    dist.destroy_process_group()
