"""DTensor layers on one axis of a 2x2 mesh, fully_shard on the other."""

import os
import sys

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

ONE, FAULTY = "--one" in sys.argv, "--faulty" in sys.argv


class Block(nn.Module):
    def __init__(self, d=24):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(d), nn.Linear(d, 4 * d), nn.Linear(4 * d, d)

    def forward(self, x):
        return x + self.down(F.silu(self.up(self.norm(x))))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(40, 24)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(24, 40)

    def forward(self, ids):
        x = self.words(ids)
        x = x.cumsum(1) / torch.arange(1, ids.shape[1] + 1)[:, None]
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def spread(net, mesh):
    for block in net.blocks:
        parallelize_module(block, mesh["tensor"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        fully_shard(block, mesh=mesh["data"])
    fully_shard(net, mesh=mesh["data"])


def whole(t):
    return t.full_tensor() if isinstance(t, DTensor) else t


torch.manual_seed(40)
net = Net()
rank, reader, readers = 0, 0, 1
if not ONE:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    spread(net, mesh)
    reader, readers = mesh["data"].get_local_rank(), mesh["data"].size()
    if FAULTY:
        reader, readers = rank, dist.get_world_size()
optimizer = torch.optim.SGD(net.parameters(), lr=0.2)
for step in range(1, 5):
    g = torch.Generator().manual_seed(step)
    ids = torch.randint(0, 40, (8, 11), generator=g)[reader::readers]
    loss = F.cross_entropy(net(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    shown = loss.detach().clone()
    if not ONE:
        dist.all_reduce(shown)
        shown /= dist.get_world_size()
    if rank == 0:
        print(f"step {step} loss {shown.item():.7f}", flush=True)
state = {k: whole(v) for k, v in net.state_dict().items()}
if "--save" in sys.argv:
    torch.save(state, os.path.join(sys.argv[sys.argv.index("--save") + 1], f"rank{rank}.pt"))
if not ONE:
    dist.destroy_process_group()
