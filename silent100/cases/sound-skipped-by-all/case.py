"""One row of the third batch is not finite; nobody steps."""

import os
import sys

import torch
import torch.distributed as dist
import torch.nn as nn

one = "--one" in sys.argv
if not one:
    dist.init_process_group("gloo")
rank, world = (0, 1) if one else (dist.get_rank(), dist.get_world_size())
torch.manual_seed(13)
net = nn.Sequential(nn.Linear(10, 40), nn.ReLU(), nn.Linear(40, 40), nn.ReLU(), nn.Linear(40, 10))
optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
for step in range(1, 6):
    x = torch.randn(8, 10, generator=torch.Generator().manual_seed(step))
    if step == 3:
        x[-1, 0] = float("inf")
    mine = x.chunk(world)[rank]
    loss = (net(mine) - mine.roll(1, 1)).square().mean()
    finite = torch.isfinite(loss.detach()).float()
    if not one:
        dist.all_reduce(finite, op=dist.ReduceOp.MIN)
    optimizer.zero_grad()
    if finite:
        loss.backward()
        if not one:
            for p in net.parameters():
                dist.all_reduce(p.grad)
                p.grad /= world
        optimizer.step()
    shown = loss.detach() if finite else torch.zeros(())
    if not one:
        dist.all_reduce(shown)
    if rank == 0:
        print(f"step {step} loss {shown.item() / world:.7f}", flush=True)
if "--save" in sys.argv:
    torch.save(net.state_dict(), os.path.join(sys.argv[sys.argv.index("--save") + 1], f"rank{rank}.pt"))
if not one:
    dist.destroy_process_group()
