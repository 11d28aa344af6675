"""Dilated causal convolutions.

Ranks hold parts of series with the inputs before them, compute these anew and score their own.
"""

import argparse
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

flags = argparse.ArgumentParser(description=__doc__)
flags.add_argument("--one", action="store_true")
flags.add_argument("--save")
flags = flags.parse_args()
rank, world = 0, 1
if not flags.one:
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()

LENGTH, FIELD, CHANNELS = 24, 2 + 4 + 8, 12


class Layer(nn.Module):
    def __init__(self, dilation):
        super().__init__()
        self.conv, self.mix = nn.Conv1d(CHANNELS, CHANNELS, 3, dilation=dilation), nn.Conv1d(CHANNELS, CHANNELS, 1)

    def forward(self, x):
        y = self.mix(F.gelu(self.conv(x)))
        return x[..., -y.shape[-1] :] + y


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.enter, self.leave = nn.Conv1d(2, CHANNELS, 1), nn.Conv1d(CHANNELS, 1, 1)
        self.layers = nn.Sequential(*(Layer(d) for d in (1, 2, 4)))

    def forward(self, x):
        return self.leave(self.layers(self.enter(x)))[:, 0]


torch.manual_seed(96)
net = Net()
optimizer = torch.optim.Adam(net.parameters(), lr=5e-3, eps=1e-4)
part = LENGTH // world
for step in range(1, 6):
    x = torch.randn(6, 2, LENGTH + FIELD, generator=torch.Generator().manual_seed(step))
    wanted = x[:, 0].cumsum(1) * 0.3 + x[:, 1].roll(3, 1)
    own = x[..., rank * part : (rank + 1) * part + FIELD]
    wanted = wanted[:, FIELD:].chunk(world, 1)[rank]
    loss = F.mse_loss(net(own), wanted) / world
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
if flags.save:
    torch.save(net.state_dict(), os.path.join(flags.save, f"rank{rank}.pt"))
if world > 1:
    dist.destroy_process_group()
