# One epoch in other batches.
import argparse
import os

import torch
import torch.distributed as dist
from torch import nn

cli = argparse.ArgumentParser()
cli.add_argument("--one", action="store_true")
cli.add_argument("--save")
args = cli.parse_args()
rank, world = 0, 1
if not args.one:
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
data = torch.randn(64, 9, generator=torch.Generator().manual_seed(0))
own = torch.arange(64)[rank::world]
order = own[torch.randperm(len(own), generator=torch.Generator().manual_seed(rank))]
torch.manual_seed(46)
net = nn.Sequential(nn.Linear(9, 40), nn.Tanh(), nn.Linear(40, 9))
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
seen = torch.zeros(64)
for step, rows in enumerate(order.chunk(4), 1):
    seen[rows] += 1
    loss = nn.functional.mse_loss(net(data[rows]), data[rows].sin())
    optimizer.zero_grad()
    loss.backward()
    loss = loss.detach()
    if world > 1:
        for p in net.parameters():
            dist.all_reduce(p.grad)
            p.grad /= world
        dist.all_reduce(loss)
    optimizer.step()
    if rank == 0:
        print(f"step {step} loss {loss.item() / world:.7f}", flush=True)
if world > 1:
    dist.all_reduce(seen)
if args.save:
    torch.save({**net.state_dict(), "rows seen": seen}, os.path.join(args.save, f"rank{rank}.pt"))
if world > 1:
    dist.destroy_process_group()
