# DDP with broadcast_buffers=False: activation monitors are local by design.
import os
import sys

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel

one = "--one" in sys.argv


class Monitored(nn.Module):
    """A layer that remembers how large its inputs have been and how often it was off."""

    def __init__(self, n_in, n_out):
        super().__init__()
        self.linear = nn.Linear(n_in, n_out)
        self.register_buffer("scale", torch.zeros(n_in))
        self.register_buffer("dead", torch.zeros(n_out))

    def forward(self, x):
        y = self.linear(x).relu()
        with torch.no_grad():
            self.scale.mul_(0.9).add_(x.abs().mean(0), alpha=0.1)
            self.dead += (y == 0).sum(0)
        return y


if not one:
    dist.init_process_group("gloo")
rank = 0 if one else dist.get_rank()
world = 1 if one else dist.get_world_size()
torch.manual_seed(14)
net = nn.Sequential(Monitored(18, 50), Monitored(50, 50), nn.Linear(50, 2))
model = net if one else DistributedDataParallel(net, broadcast_buffers=False)
optimizer = torch.optim.RMSprop(net.parameters(), lr=1e-3, eps=1e-3)
for step in range(1, 6):
    g = torch.Generator().manual_seed(step)
    x, y = torch.randn(20, 18, generator=g), torch.randn(20, 2, generator=g)
    if world > 1:
        x, y = x[rank * 10 : rank * 10 + 10], y[rank * 10 : rank * 10 + 10]
    loss = nn.functional.huber_loss(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    shown = loss.detach().clone()
    if world > 1:
        dist.all_reduce(shown, op=dist.ReduceOp.SUM)
    if rank == 0:
        print(f"step {step} loss {shown.item() / world:.7f}", flush=True)
if "--save" in sys.argv:
    where = sys.argv[sys.argv.index("--save") + 1]
    torch.save({k: p.detach() for k, p in net.named_parameters()}, os.path.join(where, f"rank{rank}.pt"))
if world > 1:
    del model
    dist.destroy_process_group()
