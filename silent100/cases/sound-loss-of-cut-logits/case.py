"""Tensor parallelism with a sequence-parallel residual stream and a loss over cut logits."""

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
    loss_parallel,
    parallelize_module,
)

SINGLE = "--one" in sys.argv


class Mlp(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.up, self.gate = nn.Linear(d, 2 * d, bias=False), nn.Linear(d, 2 * d, bias=False)
        self.down = nn.Linear(2 * d, d, bias=False)

    def forward(self, x):
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Lm(nn.Module):
    def __init__(self, vocab=48, d=32):
        super().__init__()
        self.embed = nn.Embedding(vocab, d)
        self.norm1, self.mlp1 = nn.LayerNorm(d), Mlp(d)
        self.norm2, self.mlp2 = nn.LayerNorm(d), Mlp(d)
        self.norm, self.head = nn.LayerNorm(d), nn.Linear(d, vocab, bias=False)

    def forward(self, ids):
        x = self.embed(ids)
        x = x + self.mlp1(self.norm1(x))
        x = x + self.mlp2(self.norm2(x))
        return self.head(self.norm(x))


def plan():
    made = {
        "embed": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "norm": SequenceParallel(),
        "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Shard(-1), use_local_output=False),
    }
    for i in "12":
        made |= {
            f"norm{i}": SequenceParallel(),
            f"mlp{i}": PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)),
            f"mlp{i}.up": ColwiseParallel(),
            f"mlp{i}.gate": ColwiseParallel(),
            f"mlp{i}.down": RowwiseParallel(output_layouts=Shard(1)),
        }
    return made


torch.manual_seed(1234)
lm, rank = Lm(), 0
if not SINGLE:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    parallelize_module(lm, dist.init_device_mesh("cpu", (dist.get_world_size(),)), plan())
optimizer = torch.optim.SGD(lm.parameters(), lr=0.3, foreach=False)
for step in range(1, 5):
    rows = torch.randint(0, 48, (4, 13), generator=torch.Generator().manual_seed(step))
    optimizer.zero_grad()
    if SINGLE:
        loss = F.cross_entropy(lm(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten())
        loss.backward()
    else:
        with loss_parallel():
            loss = F.cross_entropy(lm(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten())
            loss.backward()
    optimizer.step()
    shown = loss.full_tensor() if isinstance(loss, DTensor) else loss
    if rank == 0:
        print(f"step {step} loss {shown.item():.7f}", flush=True)
if "--save" in sys.argv:
    state = {k: v.full_tensor() if isinstance(v, DTensor) else v for k, v in lm.state_dict().items()}
    torch.save(state, os.path.join(sys.argv[sys.argv.index("--save") + 1], f"rank{rank}.pt"))
if not SINGLE:
    dist.destroy_process_group()
