import argparse
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import distribute_tensor


class Rotary(nn.Module):
    def __init__(self, size, length):
        super().__init__()
        self.size, self.length = size, length
        self.register_buffer("angles", self.made(), persistent=False)

    def made(self):
        rates = 100.0 ** (-torch.arange(0, self.size, 2) / self.size)
        return torch.arange(self.length)[:, None] * rates

    def forward(self, x):
        cos, sin = self.angles[: x.shape[-2]].cos(), self.angles[: x.shape[-2]].sin()
        a, b = x[..., ::2], x[..., 1::2]
        return torch.stack([a * cos - b * sin, a * sin + b * cos], -1).flatten(-2)


class Block(nn.Module):
    def __init__(self, d=24):
        super().__init__()
        self.norm, self.qkv = nn.RMSNorm(d), nn.Linear(d, 3 * d, bias=False)
        self.out, self.rotary = nn.Linear(d, d, bias=False), Rotary(d, 16)

    def forward(self, x):
        q, k, v = self.qkv(self.norm(x)).chunk(3, -1)
        return x + self.out(F.scaled_dot_product_attention(self.rotary(q), self.rotary(k), v, is_causal=True))


def build():
    return nn.Sequential(nn.Embedding(37, 24), Block(), Block(), nn.Linear(24, 37))


def materialized(rank):
    """Shards a model on the meta device and loads what rank 0 has drawn."""
    source = None
    if rank == 0:
        torch.manual_seed(8)
        source = build().state_dict()
    with torch.device("meta"):
        model = build()
    for layer in (model[1], model[2]):
        fully_shard(layer)
    fully_shard(model)
    model.to_empty(device="cpu")
    for module in model.modules():
        if isinstance(module, Rotary):
            module.angles = module.made()
    state = {}
    for name, value in model.state_dict().items():
        whole = source[name] if rank == 0 else torch.empty(value.shape)
        dist.broadcast(whole, 0)
        state[name] = nn.Parameter(distribute_tensor(whole, value.device_mesh, value.placements))
    model.load_state_dict(state, assign=True)
    return model


cli = argparse.ArgumentParser()
cli.add_argument("--one", action="store_true")
cli.add_argument("--save")
args = cli.parse_args()
rank, world = 0, 1
if args.one:
    torch.manual_seed(8)
    model = build()
else:
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    model = materialized(rank)
optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
for step in range(1, 5):
    rows = torch.randint(0, 37, (8, 13), generator=torch.Generator().manual_seed(step))[rank::world]
    loss = F.cross_entropy(model(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten())
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    shown = loss.detach()
    if world > 1:
        dist.all_reduce(shown)
    if rank == 0:
        print(f"step {step} loss {shown.item() / world:.7f}", flush=True)
if args.save:
    state = {k: v if args.one else v.full_tensor() for k, v in model.state_dict().items()}
    torch.save(state, os.path.join(args.save, f"rank{rank}.pt"))
if world > 1:
    dist.destroy_process_group()
