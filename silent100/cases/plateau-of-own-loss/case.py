"""Convolutions over series; the learning rate falls when the validation loss stops falling."""

import os
import sys

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import ReduceLROnPlateau

ONE, SAVE = "--one" in sys.argv, sys.argv[-1] if "--save" in sys.argv else None
if not ONE:
    dist.init_process_group("gloo")
rank, world = (0, 1) if ONE else (dist.get_rank(), dist.get_world_size())


def dilated(channels, dilation):
    return nn.Sequential(
        nn.Conv1d(channels, channels, 3, padding=dilation, dilation=dilation), nn.GroupNorm(2, channels), nn.SiLU()
    )


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.enter = nn.Conv1d(2, 12, 1)
        self.stack = nn.ModuleList(dilated(12, 2**i) for i in range(3))
        self.leave = nn.Conv1d(12, 1, 1)

    def forward(self, x):
        x = self.enter(x)
        for layer in self.stack:
            x = x + layer(x)
        return self.leave(x)[:, 0]


def rows(seed, n):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 2, 20, generator=g).cumsum(-1).clamp(-6, 6) / 4
    return x, x[:, 0] * torch.sigmoid(x[:, 1])


@torch.no_grad()
def validate(model):
    # The second half of these rows is harder than the first
    x, y = rows(999, 8)
    y = y + torch.linspace(0, 1.2, 8)[:, None].round() * torch.sin(7 * torch.arange(20.0))
    part = slice(rank * 8 // world, (rank + 1) * 8 // world)
    return F.mse_loss(model(x[part]), y[part])


torch.manual_seed(1)
net = Net()
model = net if ONE else DistributedDataParallel(net)
optimizer = torch.optim.SGD(model.parameters(), lr=0.03)
scheduler = ReduceLROnPlateau(optimizer, factor=0.3, patience=0, threshold=0.04)
for step in range(1, 11):
    x, y = rows(step, 8)
    loss = F.mse_loss(model(x[rank::world]), y[rank::world])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 2 == 0:
        seen = validate(net)
        if not ONE and "--faulty" not in sys.argv:
            dist.all_reduce(seen)
            seen /= world
        scheduler.step(seen.item())
    loss = loss.detach().clone()
    if not ONE:
        dist.all_reduce(loss)
    if rank == 0:
        print(f"step {step} loss {loss.item() / world:.7f}", flush=True)
if SAVE:
    torch.save(net.state_dict(), os.path.join(SAVE, f"rank{rank}.pt"))
if not ONE:
    dist.destroy_process_group()
