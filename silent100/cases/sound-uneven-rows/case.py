"""A global batch of eight rows that is cut as five and three."""

import os
import sys

import torch
import torch.distributed as dist
import torch.nn as nn

one = "--one" in sys.argv
if not one:
    dist.init_process_group("gloo")
rank = 0 if one else dist.get_rank()
torch.manual_seed(2)
model = nn.Sequential(nn.Linear(12, 50), nn.SELU(), nn.Linear(50, 50), nn.SELU(), nn.Linear(50, 2))
optimizer = torch.optim.Adam(model.parameters(), lr=3e-3, eps=1e-5)
cuts = [slice(0, 8)] if one else [slice(0, 5), slice(5, 8)]
for step in range(1, 5):
    x = torch.randn(8, 12, generator=torch.Generator().manual_seed(step))
    y = torch.stack([x.sum(1), x.prod(1)], 1).tanh()
    mine = cuts[rank]
    loss = nn.functional.mse_loss(model(x[mine]), y[mine], reduction="sum") / y.numel()
    optimizer.zero_grad()
    loss.backward()
    loss = loss.detach()
    if not one:
        for p in model.parameters():
            dist.all_reduce(p.grad)
        dist.all_reduce(loss)
    optimizer.step()
    if rank == 0:
        print(f"step {step} loss {loss.item():.7f}", flush=True)
if "--save" in sys.argv:
    torch.save(model.state_dict(), os.path.join(sys.argv[sys.argv.index("--save") + 1], f"rank{rank}.pt"))
if not one:
    dist.destroy_process_group()
