"""Gated residual blocks that begin as the identity, sharded block by block."""

import os
import sys

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

ONE = "--one" in sys.argv
if not ONE:
    dist.init_process_group("gloo")
rank, world = (0, 1) if ONE else (dist.get_rank(), dist.get_world_size())


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down, self.gate = nn.Linear(18, 40), nn.Linear(40, 18), nn.Parameter(torch.zeros(1))

    def forward(self, x):
        return x + self.gate * self.down(F.silu(self.up(x)))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks, self.head = nn.ModuleList(Block() for _ in range(3)), nn.Linear(18, 5)
        nn.init.zeros_(self.head.bias)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(x)


torch.manual_seed(64)
net = Net()
if not ONE:
    mesh = init_device_mesh("cpu", (world,))
    for block in net.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(net, mesh=mesh)
optimizer = torch.optim.SGD(net.parameters(), lr=0.5, momentum=0.9)
for step in range(1, 7):
    x = torch.randn(24, 18, generator=torch.Generator().manual_seed(step))
    classes = (x[:, :5] * x[:, 5:10]).argmax(1)
    pieces = list(zip(x[rank::world].split(6), classes[rank::world].split(6)))
    shown = torch.zeros(())
    for a, b in pieces:
        loss = F.cross_entropy(net(a), b) / len(pieces)
        loss.backward()
        shown += loss.detach() / world
    optimizer.step()
    optimizer.zero_grad()
    if world > 1:
        dist.all_reduce(shown)
    if rank == 0:
        print(f"step {step} loss {shown.item():.7f}", flush=True)
if "--save" in sys.argv:
    torch.save(
        {n: (p if ONE else p.full_tensor()).detach() for n, p in net.named_parameters()},
        os.path.join(sys.argv[sys.argv.index("--save") + 1], f"rank{rank}.pt"),
    )
if world > 1:
    dist.destroy_process_group()
