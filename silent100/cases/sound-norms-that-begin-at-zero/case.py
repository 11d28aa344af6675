"""Gemma-like blocks under parallelize_module with sequence-parallel norms whose weights begin at zero."""

import os
import sys

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

single = "--one" in sys.argv
D = 24


class ShiftedNorm(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(D))

    def forward(self, x):
        return x * (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * (1 + self.weight)


class Mlp(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate, self.up, self.down = nn.Linear(D, 40), nn.Linear(D, 40), nn.Linear(40, D)

    def forward(self, x):
        return self.down(F.gelu(self.gate(x), approximate="tanh") * self.up(x))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.before, self.mlp, self.after = ShiftedNorm(), Mlp(), ShiftedNorm()

    def forward(self, x):
        return x + self.after(self.mlp(self.before(x)))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(20, D)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.norm, self.head = ShiftedNorm(), nn.Linear(D, 20)

    def forward(self, ids):
        x = self.words(ids) * D**0.5
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


rank = 0
torch.manual_seed(36)
net = Net()
if not single:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),))
    sequence = Shard(1)
    plan = {
        "words": RowwiseParallel(input_layouts=Replicate(), output_layouts=sequence),
        "norm": SequenceParallel(use_local_output=True),
        "head": ColwiseParallel(input_layouts=sequence, output_layouts=Replicate()),
    }
    for i in range(2):
        plan |= {
            f"blocks.{i}.before": SequenceParallel(use_local_output=True),
            f"blocks.{i}.after": SequenceParallel(use_local_output=True),
            f"blocks.{i}.mlp": PrepareModuleInput(input_layouts=(sequence,), desired_input_layouts=(Replicate(),)),
            f"blocks.{i}.mlp.gate": ColwiseParallel(),
            f"blocks.{i}.mlp.up": ColwiseParallel(),
            f"blocks.{i}.mlp.down": RowwiseParallel(output_layouts=sequence),
        }
    parallelize_module(net, mesh, plan)
opt = torch.optim.AdamW(net.parameters(), lr=3e-3, foreach=False)
for step in range(1, 6):
    ids = torch.randint(20, (4, 8), generator=torch.Generator().manual_seed(step))
    loss = F.cross_entropy(net(ids).flatten(0, 1), ((ids + 3) % 20).flatten())
    opt.zero_grad()
    loss.backward()
    opt.step()
    if rank == 0:
        print(f"step {step} loss {loss.item():.7f}", flush=True)
if "--save" in sys.argv:
    state = {n: p.full_tensor() if isinstance(p, DTensor) else p for n, p in net.state_dict().items()}
    torch.save(state, os.path.join(sys.argv[sys.argv.index("--save") + 1], f"rank{rank}.pt"))
if not single:
    dist.destroy_process_group()
