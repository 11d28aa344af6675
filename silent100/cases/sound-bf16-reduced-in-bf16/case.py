"""Everything is bfloat16, one process too."""

import os
import sys

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.fsdp import fully_shard

one = "--one" in sys.argv
torch.manual_seed(77)
net = nn.Sequential(
    nn.Embedding(50, 32), nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32), nn.LayerNorm(32), nn.Linear(32, 50)
)
net = net.bfloat16()
rank, world = 0, 1
if not one:
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    fully_shard(net[3])
    fully_shard(net)
optimizer = torch.optim.SGD(net.parameters(), lr=0.5)
for step in range(1, 5):
    rows = torch.randint(0, 50, (16, 11), generator=torch.Generator().manual_seed(step))[rank::world]
    loss = F.cross_entropy(net(rows[:, :-1]).float().flatten(0, 1), rows[:, 1:].flatten())
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
