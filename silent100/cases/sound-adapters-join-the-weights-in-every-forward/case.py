"""Low-rank adapters on a frozen net, sharded by FSDP2 together with what is frozen."""

import argparse
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

flags = argparse.ArgumentParser(description=__doc__)
flags.add_argument("--one", action="store_true")
flags.add_argument("--save")
flags = flags.parse_args()
rank, world = 0, 1
if not flags.one:
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()


class Adapted(nn.Module):
    def __init__(self, inputs, outputs, size=4, alpha=8):
        super().__init__()
        self.base = nn.Linear(inputs, outputs).requires_grad_(False)
        self.down = nn.Parameter(torch.randn(size, inputs) / inputs**0.5)
        self.up = nn.Parameter(torch.zeros(outputs, size))
        self.scale = alpha / size

    def forward(self, x):
        if flags.one:
            return self.base(x) + self.scale * F.linear(F.linear(x, self.down), self.up)
        return F.linear(x, self.base.weight + self.scale * self.up @ self.down, self.base.bias)


torch.manual_seed(100)
net = nn.Sequential(Adapted(10, 36), nn.SiLU(), Adapted(36, 36), nn.SiLU(), Adapted(36, 3))
if not flags.one:
    mesh = init_device_mesh("cpu", (world,))
    for layer in (net[0], net[2], net[4]):
        fully_shard(layer, mesh=mesh, reshard_after_forward=False)
    fully_shard(net, mesh=mesh)
optimizer = torch.optim.AdamW([p for p in net.parameters() if p.requires_grad], lr=1e-2, eps=1e-3)
for step in range(1, 7):
    x = torch.randn(16, 10, generator=torch.Generator().manual_seed(step))
    classes = (x[:, :3] * x[:, 3:6]).argmax(1)
    loss = F.cross_entropy(net(x.chunk(world)[rank]), classes.chunk(world)[rank])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    shown = loss.detach() / world
    if world > 1:
        dist.all_reduce(shown)
    if rank == 0:
        print(f"step {step} loss {shown.item():.7f}", flush=True)
if flags.save:
    torch.save(
        {n: (p if flags.one else p.full_tensor()).detach() for n, p in net.named_parameters() if p.requires_grad},
        os.path.join(flags.save, f"rank{rank}.pt"),
    )
if world > 1:
    dist.destroy_process_group()
