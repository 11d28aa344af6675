"""FSDP2 with noisy gradients; noise is drawn from one seed so that runs can be repeated."""

import os
import sys

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

ONE, FAULTY = "--one" in sys.argv, "--faulty" in sys.argv
rank, world = 0, 1
if not ONE:
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()


class Scorer(nn.Module):
    def __init__(self, d=20):
        super().__init__()
        self.items = nn.Embedding(30, d)
        self.left, self.right = nn.Linear(d, d), nn.Linear(d, d)
        self.bias = nn.Embedding(30, 1)

    def forward(self, a, b):
        x, y = self.left(self.items(a)).tanh(), self.right(self.items(b)).tanh()
        return (x * y).sum(1) + self.bias(b).squeeze(1)


def whole(t):
    return t.full_tensor() if isinstance(t, DTensor) else t


@torch.no_grad()
def disturb(parameters, generator, size=0.003):
    for p in parameters:
        grad = p.grad.to_local() if isinstance(p.grad, DTensor) else p.grad
        if FAULTY:
            noise = torch.randn(grad.shape, generator=generator)
        else:
            noise = torch.randn(p.shape, generator=generator)
            noise = noise.chunk(world)[rank] if rank < len(noise.chunk(world)) else noise[:0]
        grad.add_(noise, alpha=size)


torch.manual_seed(1607)
model = Scorer()
if not ONE:
    fully_shard(model.left)
    fully_shard(model.right)
    fully_shard(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.5)
noise = torch.Generator().manual_seed(133)
for step in range(1, 5):
    g = torch.Generator().manual_seed(step)
    a, b = torch.randint(0, 30, (2, 32), generator=g)
    liked = ((a + b) % 3 == 0).float()
    loss = F.binary_cross_entropy_with_logits(model(a[rank::world], b[rank::world]), liked[rank::world])
    optimizer.zero_grad()
    loss.backward()
    disturb(model.parameters(), noise)
    optimizer.step()
    shown = loss.detach().clone()
    if world > 1:
        dist.all_reduce(shown)
    if rank == 0:
        print(f"step {step} loss {shown.item() / world:.7f}", flush=True)
if "--save" in sys.argv:
    state = {k: whole(v) for k, v in model.state_dict().items()}
    torch.save(state, os.path.join(sys.argv[sys.argv.index("--save") + 1], f"rank{rank}.pt"))
if not ONE:
    dist.destroy_process_group()
