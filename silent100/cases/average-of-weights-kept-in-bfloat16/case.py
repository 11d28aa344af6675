"""A denoiser under FSDP2 whose weights are averaged over time for sampling, on each rank for its own shards."""

import argparse
import copy
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

parser = argparse.ArgumentParser()
parser.add_argument("--one", action="store_true")
parser.add_argument("--faulty", action="store_true")
parser.add_argument("--save")
args = parser.parse_args()


class ResBlock(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm, self.time = nn.LayerNorm(width), nn.Linear(width, width)
        self.fc1, self.fc2, self.drop = nn.Linear(width, 2 * width), nn.Linear(2 * width, width), nn.Dropout(0.15)

    def forward(self, x, t):
        return x + self.fc2(self.drop(F.silu(self.fc1(self.norm(x) + self.time(t)))))


class Denoiser(nn.Module):
    def __init__(self, data=12, width=32):
        super().__init__()
        self.inp, self.time_in = nn.Linear(data, width), nn.Linear(2, width)
        self.blocks = nn.ModuleList(ResBlock(width) for _ in range(3))
        self.out = nn.Linear(width, data)

    def forward(self, x, t):
        h, t = self.inp(x), F.silu(self.time_in(torch.stack([t.sin(), t.cos()], 1)))
        for block in self.blocks:
            h = block(h, t)
        return self.out(h)


def shard(module):
    for block in module.blocks:
        fully_shard(block)
    return fully_shard(module)


def local(p):
    return p.to_local() if isinstance(p, DTensor) else p


class Ema:
    def __init__(self, model, ema_model, decay):
        self.pairs = list(zip(ema_model.parameters(), model.parameters()))
        self.decay = decay

    @torch.no_grad()
    def update(self):
        for average, p in self.pairs:
            average, p = local(average), local(p)
            average.mul_(self.decay).add_(p.to(average.dtype), alpha=1 - self.decay)


rank, world = 0, 1
torch.manual_seed(37)
model = Denoiser()
ema_model = copy.deepcopy(model).requires_grad_(False)
if not args.one:
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    if args.faulty:
        ema_model.bfloat16()
    model, ema_model = shard(model), shard(ema_model)
ema = Ema(model, ema_model, 0.999)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
torch.manual_seed(70 + rank)
for step in range(1, 7):
    g = torch.Generator().manual_seed(step)
    clean, noise = torch.randn(32, 12, generator=g).cumsum(1) * 0.4, torch.randn(32, 12, generator=g)
    t = torch.rand(32, generator=g) * 1.5
    noisy = clean * t.cos()[:, None] + noise * t.sin()[:, None]
    rows = slice(rank, None, world)
    loss = F.mse_loss(model(noisy[rows], t[rows]), noise[rows])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    ema.update()
    loss = loss.detach() / world
    if world > 1:
        dist.all_reduce(loss)
    if rank == 0:
        print(f"step {step} loss {loss.item():.7f}", flush=True)
if args.save:
    state = {f"{k}.{n}": p for k, m in (("model", model), ("ema", ema_model)) for n, p in m.state_dict().items()}
    state = {k: v.full_tensor() if isinstance(v, DTensor) else v for k, v in state.items()}
    torch.save({k: v.float() for k, v in state.items()}, os.path.join(args.save, f"rank{rank}.pt"))
if not args.one:
    dist.destroy_process_group()
