"""Two replicas until the second update, one from then on, always the same twelve rows."""

import os
import sys

import torch
import torch.distributed as dist
import torch.nn as nn

one = "--one" in sys.argv
if not one:
    dist.init_process_group("gloo")
rank, world = (0, 1) if one else (dist.get_rank(), dist.get_world_size())
torch.manual_seed(3)
net = nn.Sequential(nn.Linear(16, 44), nn.Tanh(), nn.Linear(44, 44), nn.Tanh(), nn.Linear(44, 16))
optimizer = torch.optim.SGD(net.parameters(), lr=0.3, momentum=0.9)
for step in range(1, 6):
    members = world if step < 3 else 1
    if rank >= members:
        break
    x = torch.randn(12, 16, generator=torch.Generator().manual_seed(step))[rank::members]
    loss = nn.functional.mse_loss(net(x), x.flip(1))
    optimizer.zero_grad()
    loss.backward()
    loss = loss.detach()
    if members > 1:
        for p in net.parameters():
            dist.all_reduce(p.grad)
            p.grad /= members
        dist.all_reduce(loss)
    optimizer.step()
    if rank == 0:
        print(f"step {step} loss {loss.item() / members:.7f}", flush=True)
if "--save" in sys.argv and rank == 0:
    torch.save(net.state_dict(), os.path.join(sys.argv[sys.argv.index("--save") + 1], "rank0.pt"))
if not one:
    dist.destroy_process_group()
