"""The first update has a learning rate of zero, so weights do not change although gradients are there."""

import argparse
import os

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP

cli = argparse.ArgumentParser()
cli.add_argument("--one", action="store_true")
cli.add_argument("--save")
args = cli.parse_args()
rank, world = 0, 1
if not args.one:
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(22)
net = nn.Sequential(nn.Conv1d(4, 24, 3), nn.GroupNorm(3, 24), nn.SiLU(), nn.Flatten(), nn.Linear(24 * 10, 4))
model = net if args.one else DDP(net)
optimizer = torch.optim.SGD(net.parameters(), lr=0.2, momentum=0.9)
scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: min(n / 3, 1.0))
for step in range(1, 6):
    g = torch.Generator().manual_seed(step)
    x, y = torch.randn(12, 4, 12, generator=g), torch.randint(0, 4, (12,), generator=g)
    loss = nn.functional.cross_entropy(model(x[rank::world]), y[rank::world])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    scheduler.step()
    shown = loss.detach()
    if world > 1:
        dist.all_reduce(shown)
    if rank == 0:
        print(f"step {step} loss {shown.item() / world:.7f}", flush=True)
if args.save:
    torch.save(net.state_dict(), os.path.join(args.save, f"rank{rank}.pt"))
if world > 1:
    del model  # before its process group
    dist.destroy_process_group()
