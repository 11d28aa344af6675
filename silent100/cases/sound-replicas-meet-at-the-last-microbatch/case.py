"""Hybrid sharding, two shards by two replicas: three microbatches are scattered each, and replicas meet once a step."""

import os
import sys

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor

ONE = "--one" in sys.argv
VOCAB, DIM, MICRO = 40, 32, 3


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.rnn = nn.LayerNorm(DIM), nn.GRU(DIM, DIM, batch_first=True)
        self.ffn = nn.Sequential(nn.LayerNorm(DIM), nn.Linear(DIM, 64), nn.SiLU(), nn.Linear(64, DIM))

    def forward(self, x):
        x = x + self.rnn(self.norm(x))[0]
        return x + self.ffn(x)


class Lm(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, DIM)
        self.layers = nn.ModuleList([Layer(), Layer()])
        self.head = nn.Linear(DIM, VOCAB)

    def forward(self, ids):
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


rank, world = 0, 1
torch.manual_seed(66)
model = Lm()
if not ONE:
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    for layer in model.layers:
        fully_shard(layer, mesh=mesh, reshard_after_forward=False)
    fully_shard(model, mesh=mesh)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, eps=1e-4)
for step in range(1, 5):
    rows = torch.randint(0, VOCAB, (24, 9), generator=torch.Generator().manual_seed(step))
    optimizer.zero_grad()
    shown = torch.zeros(())
    for number, micro in enumerate(rows[rank::world].chunk(MICRO)):
        if isinstance(model, FSDPModule):
            model.set_requires_all_reduce(number == MICRO - 1)
        loss = F.cross_entropy(model(micro[:, :-1]).flatten(0, 1), micro[:, 1:].flatten()) / MICRO
        loss.backward()
        shown += loss.detach() / world
    optimizer.step()
    if world > 1:
        dist.all_reduce(shown)
    if rank == 0:
        print(f"step {step} loss {shown.item():.7f}", flush=True)
if "--save" in sys.argv:
    state = {k: v.full_tensor() if isinstance(v, DTensor) else v for k, v in model.state_dict().items()}
    torch.save(state, os.path.join(sys.argv[sys.argv.index("--save") + 1], f"rank{rank}.pt"))
if not ONE:
    dist.destroy_process_group()
