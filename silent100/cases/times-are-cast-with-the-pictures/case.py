"""A diffusion transformer under FSDP2 in bfloat16; one process computes in bfloat16 under autocast."""

import argparse
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

cli = argparse.ArgumentParser()
cli.add_argument("--one", action="store_true")
cli.add_argument("--faulty", action="store_true")
cli.add_argument("--save")
args = cli.parse_args()
DIM = 32


class Time(nn.Module):
    """Sines and cosines of a time from 0 to 1000, then a small network."""

    def __init__(self):
        super().__init__()
        self.lift, self.out = nn.Linear(DIM, DIM), nn.Linear(DIM, 2 * DIM)

    def forward(self, t):
        rates = 1000.0 ** (-torch.arange(DIM // 2) / (DIM // 2))
        waves = t.float()[:, None] * rates
        waves = torch.cat([waves.sin(), waves.cos()], -1)
        return self.out(F.silu(self.lift(waves.to(self.lift.weight.dtype))))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.qkv, self.proj = nn.LayerNorm(DIM), nn.Linear(DIM, 3 * DIM), nn.Linear(DIM, DIM)
        self.fc1, self.fc2 = nn.Linear(DIM, 64), nn.Linear(64, DIM)

    def forward(self, x, shift, scale):
        h = self.norm(x) * (1 + scale[:, None]) + shift[:, None]
        q, k, v = self.qkv(h).unflatten(-1, (3, 4, -1)).permute(2, 0, 3, 1, 4)
        x = x + self.proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return x + self.fc2(F.gelu(self.fc1(x)))


class Denoiser(nn.Module):
    def __init__(self):
        super().__init__()
        self.time, self.patch = Time(), nn.Linear(8, DIM)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.out = nn.Linear(DIM, 8)
        nn.init.normal_(self.out.weight, std=0.02)

    def forward(self, x, t):
        shift, scale = self.time(t).chunk(2, -1)
        x = self.patch(x.to(self.patch.weight.dtype))
        for block in self.blocks:
            x = block(x, shift, scale)
        return self.out(x)


rank, world = 0, 1
torch.manual_seed(2881)
model = Denoiser()
if not args.one:
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32, cast_forward_inputs=args.faulty)
    for block in model.blocks:
        fully_shard(block, mp_policy=policy)
    fully_shard(model, mp_policy=policy)
opt = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
for step in range(1, 5):
    g = torch.Generator().manual_seed(step)
    clean, noise = torch.randn(24, 1, 8, generator=g), torch.randn(24, 9, 8, generator=g)
    t = torch.rand(24, generator=g)
    noisy = (1 - t)[:, None, None] * clean + t[:, None, None] * noise
    noisy, noise, t = (v.chunk(world)[rank] for v in (noisy, noise, 1000 * t))
    with torch.autocast("cpu", torch.bfloat16, enabled=args.one):
        guess = model(noisy, t)
    loss = F.mse_loss(guess.float(), noise)
    opt.zero_grad()
    loss.backward()
    opt.step()
    loss = loss.detach()
    if world > 1:
        dist.all_reduce(loss)
    if rank == 0:
        print(f"step {step} loss {loss.item() / world:.7f}", flush=True)
if args.save:
    state = {k: v.full_tensor() if isinstance(v, DTensor) else v for k, v in model.state_dict().items()}
    torch.save(state, os.path.join(args.save, f"rank{rank}.pt"))
if world > 1:
    dist.destroy_process_group()
