"""FSDP2 on a small U-shaped network whose tensors do not divide by two; losses are weighed by rows."""

import argparse
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

parser = argparse.ArgumentParser()
parser.add_argument("--one", action="store_true")
parser.add_argument("--save")
args = parser.parse_args()


class Block(nn.Module):
    def __init__(self, i, o):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(i, o, 3, padding=1), nn.GroupNorm(1, o)

    def forward(self, x):
        return F.silu(self.norm(self.conv(x)))


class U(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = Block(1, 5), Block(5, 9), Block(14, 7)
        self.out = nn.Conv2d(7, 1, 1)

    def forward(self, x):
        a = self.a(x)
        b = F.interpolate(self.b(F.max_pool2d(a, 2)), scale_factor=2)
        return self.out(self.c(torch.cat([a, b], 1)))


rank, world, rows = 0, 1, slice(None)
torch.manual_seed(29)
net = U()
if not args.one:
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (world,))
    for block in (net.a, net.b, net.c):
        fully_shard(block, mesh=mesh, reshard_after_forward=block is not net.c)
    fully_shard(net, mesh=mesh)
    rows = (slice(0, 5), slice(5, 8))[rank]
optimizer = torch.optim.AdamW(net.parameters(), lr=5e-3, eps=1e-3, foreach=False)
for step in range(1, 6):
    clean = torch.rand(8, 1, 6, 6, generator=torch.Generator().manual_seed(step))
    noisy = clean + 0.2 * torch.randn(clean.shape, generator=torch.Generator().manual_seed(step + 90))
    loss = (net(noisy[rows]) - clean[rows]).abs().sum() / clean.numel()
    optimizer.zero_grad()
    (loss * world).backward()
    optimizer.step()
    loss = loss.detach()
    if world > 1:
        dist.all_reduce(loss)
    if rank == 0:
        print(f"step {step} loss {loss.item():.7f}", flush=True)
if args.save:
    whole = {n: (t.full_tensor() if world > 1 else t) for n, t in net.state_dict().items()}
    torch.save(whole, os.path.join(args.save, f"rank{rank}.pt"))
if world > 1:
    dist.destroy_process_group()
