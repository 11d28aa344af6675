"""Odd sizes everywhere over three ranks."""

import os
import sys

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.fsdp import fully_shard

one = "--one" in sys.argv


class Odd(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(47, 29)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(29), nn.Linear(29, 53), nn.SiLU(), nn.Linear(53, 29)) for _ in range(2)
        )
        self.scale = nn.Parameter(torch.ones(2))
        self.head = nn.Linear(29, 47)

    def forward(self, ids):
        x = self.embed(ids)
        for i, layer in enumerate(self.layers):
            x = x + self.scale[i] * layer(x)
        return self.head(x)


if not one:
    dist.init_process_group("gloo")
rank, world = (0, 1) if one else (dist.get_rank(), dist.get_world_size())
torch.manual_seed(19)
net = Odd()
if not one:
    for layer in net.layers:
        fully_shard(layer)
    fully_shard(net)
optimizer = torch.optim.SGD(net.parameters(), lr=0.3)
for step in range(1, 4):
    rows = torch.randint(0, 47, (9, 8), generator=torch.Generator().manual_seed(step))[rank::world]
    loss = F.cross_entropy(net(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    loss = loss.detach()
    if not one:
        dist.all_reduce(loss)
    if rank == 0:
        print(f"step {step} loss {loss.item() / world:.7f}", flush=True)
if "--save" in sys.argv:
    state = {k: v if one else v.full_tensor() for k, v in net.state_dict().items()}
    torch.save(state, os.path.join(sys.argv[sys.argv.index("--save") + 1], f"rank{rank}.pt"))
if not one:
    dist.destroy_process_group()
