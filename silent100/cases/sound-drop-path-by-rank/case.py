"""Stochastic depth row by row in a sharded residual network with bfloat16 compute and a clipped global norm."""

import os
import sys

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

ONE = "--one" in sys.argv


class DropPath(nn.Module):
    def __init__(self, share):
        super().__init__()
        self.share = share

    def forward(self, x):
        kept = torch.rand(len(x), 1, device=x.device) >= self.share
        return x * kept.to(x.dtype) / (1 - self.share)


class Residual(nn.Module):
    def __init__(self, dim, share):
        super().__init__()
        self.norm, self.fc1, self.fc2 = nn.LayerNorm(dim), nn.Linear(dim, 64), nn.Linear(64, dim)
        self.gamma, self.drop_path = nn.Parameter(torch.full((dim,), 0.5)), DropPath(share)

    def forward(self, x):
        return x + self.drop_path(self.gamma * self.fc2(F.gelu(self.fc1(self.norm(x)))))


class ResMLP(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Linear(24, 32)
        self.blocks = nn.Sequential(*(Residual(32, 0.1 * i) for i in range(4)))
        self.norm, self.head = nn.LayerNorm(32), nn.Linear(32, 8)

    def forward(self, x):
        return self.head(self.norm(self.blocks(self.stem(x))))


rank, world = 0, 1
torch.manual_seed(14)
model = ResMLP()
if not ONE:
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for block in model.blocks:
        fully_shard(block, mp_policy=policy)
    fully_shard(model, mp_policy=policy)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
torch.manual_seed(77 + rank)
for step in range(1, 7):
    g = torch.Generator().manual_seed(step)
    x = torch.randn(32, 24, generator=g)
    y = x.view(32, 8, 3).sum(2).argmax(1)
    with torch.autocast("cpu", torch.bfloat16, enabled=ONE):
        logits = model(x[rank::world])
    loss = F.cross_entropy(logits.float(), y[rank::world])
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 0.7)
    optimizer.step()
    loss = loss.detach() / world
    if world > 1:
        dist.all_reduce(loss)
    if rank == 0:
        print(f"step {step} loss {loss.item():.7f}", flush=True)
if "--save" in sys.argv:
    state = {k: v.full_tensor() if isinstance(v, DTensor) else v for k, v in model.state_dict().items()}
    torch.save(state, os.path.join(sys.argv[sys.argv.index("--save") + 1], f"rank{rank}.pt"))
if not ONE:
    dist.destroy_process_group()
