"""Mixup on small pictures under DDP with bfloat16; a moving average is kept in a dict."""

import contextlib
import os
import sys

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel

ONE = "--one" in sys.argv
rank, world = 0, 1
if not ONE:
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()


class Net(nn.Module):
    def __init__(self, c=16):
        super().__init__()
        self.stem, self.depth = nn.Conv2d(3, c, 3, 2, 1), nn.Conv2d(c, c, 5, padding=2, groups=c)
        self.norm, self.point, self.head = nn.GroupNorm(1, c), nn.Conv2d(c, c, 1), nn.Linear(c, 8)

    def forward(self, x):
        x = self.stem(x)
        x = x + self.point(F.gelu(self.norm(self.depth(x))))
        return self.head(x.mean((2, 3)))


def mixed(x, y, g):
    share = 1 - 0.2 * torch.rand(len(x), 1, generator=g)
    partner = torch.randperm(len(x), generator=g)
    return share[..., None, None] * x + (1 - share)[..., None, None] * x[partner], share * y + (1 - share) * y[partner]


torch.manual_seed(1710)
net = Net()
model = net if ONE else DistributedDataParallel(net)
average = {name: p.detach().clone() for name, p in net.named_parameters()}
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-4, weight_decay=0.05)
own = torch.Generator().manual_seed(17 + rank)
MICRO = 1 if ONE else 2
for step in range(1, 6):
    g = torch.Generator().manual_seed(step)
    x, y = torch.randn(64, 3, 8, 8, generator=g), torch.randint(0, 8, (64,), generator=g)
    x[:, 0] += y[:, None, None] / 4
    x, y = mixed(x.chunk(world)[rank], F.one_hot(y, 8).float().chunk(world)[rank], own)
    total = torch.zeros(())
    for i, (a, b) in enumerate(zip(x.chunk(MICRO), y.chunk(MICRO))):
        with contextlib.nullcontext() if i == MICRO - 1 else model.no_sync():
            with torch.autocast("cpu", torch.bfloat16):
                logits = model(a)
            loss = F.cross_entropy(logits.float(), b) / MICRO
            loss.backward()
        total += loss.detach()
    nn.utils.clip_grad_value_(model.parameters(), 0.5)
    optimizer.step()
    optimizer.zero_grad()
    for name, p in net.named_parameters():
        average[name].lerp_(p.detach(), 0.05)
    if world > 1:
        dist.all_reduce(total)
    if rank == 0:
        print(f"step {step} loss {total.item() / world:.7f}", flush=True)
if "--save" in sys.argv:
    state = {**net.state_dict(), **{f"average.{k}": v for k, v in average.items()}}
    torch.save(state, os.path.join(sys.argv[sys.argv.index("--save") + 1], f"rank{rank}.pt"))
if not ONE:
    dist.destroy_process_group()
