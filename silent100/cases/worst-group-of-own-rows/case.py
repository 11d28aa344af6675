"""Distributionally robust training: the weights of three groups of rows follow the groups' losses."""

import os
import sys

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

ONE, FAULTY = "--one" in sys.argv, "--faulty" in sys.argv
if not ONE:
    dist.init_process_group("gloo")
rank, world = (0, 1) if ONE else (dist.get_rank(), dist.get_world_size())

GROUPS, ETA = 3, 0.5
weights = torch.full((GROUPS,), 1 / GROUPS)
torch.manual_seed(38)
net = nn.Sequential(nn.Linear(10, 36), nn.ReLU(), nn.Linear(36, 36), nn.ReLU(), nn.Linear(36, 2))
optimizer = torch.optim.Adam(net.parameters(), lr=5e-3, eps=1e-4)


def per_group(losses, group):
    sums = torch.zeros(GROUPS).index_add(0, group, losses)
    return sums, torch.bincount(group, minlength=GROUPS).float()


for step in range(1, 6):
    g = torch.Generator().manual_seed(step)
    x, group = torch.randn(24, 10, generator=g), torch.randint(0, GROUPS, (24,), generator=g)
    classes = (x[torch.arange(24), group] + 0.5 * x[:, 5] > 0).long()
    x, group, classes = x.chunk(world)[rank], group.chunk(world)[rank], classes.chunk(world)[rank]
    sums, counts = per_group(F.cross_entropy(net(x), classes, reduction="none"), group)
    seen, all_counts = sums.detach().clone(), counts.clone()
    if world > 1:
        dist.all_reduce(all_counts)
        if not FAULTY:
            dist.all_reduce(seen)
    means = seen / (counts if FAULTY else all_counts).clamp(min=1)
    weights = weights * (ETA * means).exp()
    weights = weights / weights.sum()
    loss = (weights * sums / all_counts.clamp(min=1)).sum()
    optimizer.zero_grad()
    loss.backward()
    shown = loss.detach()
    if world > 1:
        for p in net.parameters():
            dist.all_reduce(p.grad)
        dist.all_reduce(shown)
    optimizer.step()
    if rank == 0:
        print(f"step {step} loss {shown.item():.7f}", flush=True)
if "--save" in sys.argv:
    torch.save(net.state_dict(), os.path.join(sys.argv[sys.argv.index("--save") + 1], f"rank{rank}.pt"))
if world > 1:
    dist.destroy_process_group()
