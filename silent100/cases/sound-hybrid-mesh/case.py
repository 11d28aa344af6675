"""HSDP on a mesh of two by two with an uneven last layer."""

import os
import sys

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

one = "--one" in sys.argv
torch.manual_seed(67)
net = nn.Sequential(nn.Linear(13, 48), nn.SiLU(), nn.Linear(48, 48), nn.SiLU(), nn.Linear(48, 5))
rank, world = 0, 1
if not one:
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    fully_shard(net[2], mesh=mesh)
    fully_shard(net, mesh=mesh)
optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2, eps=1e-4)
for step in range(1, 5):
    g = torch.Generator().manual_seed(step)
    x, y = torch.randn(16, 13, generator=g), torch.randint(0, 5, (16,), generator=g)
    loss = nn.functional.cross_entropy(net(x[rank::world]), y[rank::world])
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
