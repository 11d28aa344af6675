"""Lookahead round an optimizer under fully_shard: slow weights are kept in pieces, and jumps come from no gradient."""

import os
import sys

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.fsdp import fully_shard

ALONE = "--one" in sys.argv


class Lookahead:
    def __init__(self, inner, every=3, back=0.5):
        self.inner, self.every, self.back, self.count = inner, every, back, 0
        self.slow = [[p.detach().clone() for p in g["params"]] for g in inner.param_groups]

    def zero_grad(self):
        self.inner.zero_grad()

    @torch.no_grad()
    def step(self):
        self.inner.step()
        self.count += 1
        if self.count % self.every:
            return
        for group, slow in zip(self.inner.param_groups, self.slow, strict=True):
            for p, s in zip(group["params"], slow, strict=True):
                s.add_(p.detach() - s, alpha=self.back)
                p.copy_(s)


class UNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.down1, self.down2 = nn.Conv1d(2, 8, 4, 2, 1), nn.Conv1d(8, 16, 4, 2, 1)
        self.up2, self.up1 = nn.ConvTranspose1d(16, 8, 4, 2, 1), nn.ConvTranspose1d(16, 2, 4, 2, 1)
        self.time = nn.Embedding(10, 16)

    def forward(self, x, t):
        a = F.silu(self.down1(x))
        b = F.silu(self.down2(a)) + self.time(t)[..., None]
        return self.up1(torch.cat([F.silu(self.up2(b)), a], 1))


rank, world = 0, 1
torch.manual_seed(90)
net = UNet()
if not ALONE:
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    mesh = dist.init_device_mesh("cpu", (world,))
    for part in (net.down1, net.down2, net.up2, net.up1):
        fully_shard(part, mesh=mesh)
    fully_shard(net, mesh=mesh)
ahead = Lookahead(torch.optim.RAdam(net.parameters(), lr=5e-3))
for step in range(1, 8):
    g = torch.Generator().manual_seed(step)
    x, noise, t = (
        torch.randn(6, 2, 16, generator=g).cumsum(-1),
        torch.randn(6, 2, 16, generator=g),
        torch.randint(10, (6,), generator=g),
    )
    x, noise, t = (v.chunk(world)[rank] for v in (x, noise, t))
    mix = (t[:, None, None] + 1) / 11
    loss = F.mse_loss(net((1 - mix) * x + mix * noise, t), noise)
    ahead.zero_grad()
    loss.backward()
    ahead.step()
    loss = loss.detach().clone()
    if world > 1:
        dist.all_reduce(loss)
    if rank == 0:
        print(f"step {step} loss {loss.item() / world:.7f}", flush=True)
if "--save" in sys.argv:
    state = {n: p.full_tensor() if world > 1 else p for n, p in net.state_dict().items()}
    torch.save(state, os.path.join(sys.argv[sys.argv.index("--save") + 1], f"rank{rank}.pt"))
if world > 1:
    dist.destroy_process_group()
