"""ZeRO-2: gradients are reduced to owners; others drop theirs. Owners hold uneven parts."""

import os
import sys

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

one = "--one" in sys.argv
if not one:
    dist.init_process_group("gloo")
rank, world = (0, 1) if one else (dist.get_rank(), dist.get_world_size())
torch.manual_seed(57)
net = nn.Sequential(
    nn.Embedding(40, 30), nn.LayerNorm(30), nn.Linear(30, 90), nn.ReLU(), nn.Linear(90, 30), nn.Linear(30, 40)
)
parameters = list(net.parameters())
owner = {p: 0 if one or i < 2 else 1 for i, p in enumerate(parameters)}
optimizer = torch.optim.Adam([p for p in parameters if owner[p] == rank], lr=5e-3, eps=1e-5)
for step in range(1, 5):
    rows = torch.randint(0, 40, (12, 8), generator=torch.Generator().manual_seed(step))[rank::world]
    loss = F.cross_entropy(net(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten())
    for p in parameters:
        p.grad = None
    loss.backward()
    loss = loss.detach()
    if not one:
        for p in parameters:
            dist.reduce(p.grad, dst=owner[p])
            p.grad = p.grad / world if owner[p] == rank else None
        dist.all_reduce(loss)
    optimizer.step()
    if not one:
        for p in parameters:
            dist.broadcast(p.data, src=owner[p])
    if rank == 0:
        print(f"step {step} loss {loss.item() / world:.7f}", flush=True)
if "--save" in sys.argv:
    torch.save(net.state_dict(), os.path.join(sys.argv[sys.argv.index("--save") + 1], f"rank{rank}.pt"))
if not one:
    dist.destroy_process_group()
