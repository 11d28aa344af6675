"""FSDP2 with AdamW: decayed and undecayed groups, built from sets of names."""

import argparse
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.fsdp import fully_shard


class Mixer(nn.Module):
    def __init__(self, d, length):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(d), nn.LayerNorm(d)
        self.tokens = nn.Linear(length, length)
        self.channels = nn.Sequential(nn.Linear(d, 2 * d), nn.GELU(), nn.Linear(2 * d, d))

    def forward(self, x):
        x = x + self.tokens(self.norm1(x).transpose(1, 2)).transpose(1, 2)
        return x + self.channels(self.norm2(x))


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.patch = nn.Linear(12, 24)
        self.blocks = nn.ModuleList(Mixer(24, 8) for _ in range(2))
        self.norm, self.fc = nn.LayerNorm(24), nn.Linear(24, 5)

    def forward(self, x):
        x = self.patch(x)
        for block in self.blocks:
            x = block(x)
        return self.fc(self.norm(x).mean(1))


def groups(model, shuffled):
    named = dict(model.named_parameters())
    decayed = {n for n in named if n.endswith("weight") and "norm" not in n}
    rest = named.keys() - decayed
    order = (lambda names: sorted(names, key=lambda n: n[::-1])) if shuffled else sorted
    built = [
        {"params": [named[n] for n in order(decayed)], "weight_decay": 0.3},
        {"params": [named[n] for n in order(rest)], "weight_decay": 0.0},
    ]
    return built[::-1] if shuffled else built


cli = argparse.ArgumentParser()
cli.add_argument("--one", action="store_true")
cli.add_argument("--save")
args = cli.parse_args()
torch.manual_seed(31)
model = Classifier()
rank, world = 0, 1
if not args.one:
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    mesh = dist.init_device_mesh("cpu", (world,))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
optimizer = torch.optim.AdamW(groups(model, not args.one), lr=2e-3, eps=1e-4)
for step in range(1, 6):
    g = torch.Generator().manual_seed(step)
    x, y = torch.randn(12, 8, 12, generator=g), torch.randint(0, 5, (12,), generator=g)
    loss = F.cross_entropy(model(x[rank::world]), y[rank::world])
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    mean = loss.detach()
    if not args.one:
        dist.all_reduce(mean)
    if rank == 0:
        print(f"step {step} loss {mean.item() / world:.7f}", flush=True)
if args.save:
    state = {k: v if args.one else v.full_tensor() for k, v in model.state_dict().items()}
    torch.save(state, os.path.join(args.save, f"rank{rank}.pt"))
if not args.one:
    dist.destroy_process_group()
