"""Tensor parallelism with a residual stream that is cut along the sequence, in bfloat16."""

import os
import sys

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

ONE, FAULTY = "--one" in sys.argv, "--faulty" in sys.argv
rank, tp = 0, 1
if not ONE:
    dist.init_process_group("gloo")
    rank, tp = dist.get_rank(), dist.get_world_size()


def gathered(x):
    parts = [torch.empty(x.shape) for _ in range(tp)]
    dist.all_gather(parts, x.float().contiguous())
    return torch.cat(parts, 1)


def scattered(x):
    x = x.float().contiguous()
    dist.all_reduce(x)
    return x.chunk(tp, 1)[rank].contiguous()


class Widen(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return gathered(x)

    @staticmethod
    def backward(ctx, g):
        return scattered(g)


class Narrow(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return scattered(x)

    @staticmethod
    def backward(ctx, g):
        return gathered(g)


class Block(nn.Module):
    def __init__(self, d=32, hidden=96):
        super().__init__()
        self.norm = nn.LayerNorm(d)
        for p in self.norm.parameters():
            p.sequence_parallel = True
        self.up = nn.Parameter((torch.randn(hidden, d) / 6).chunk(tp)[rank].clone())
        self.down = nn.Parameter((torch.randn(d, hidden) / 10).chunk(tp, 1)[rank].clone())

    def forward(self, x):
        h = self.norm(x)
        h = (h if ONE else Widen.apply(h)).bfloat16()
        y = F.gelu(h @ self.up.bfloat16().T) @ self.down.bfloat16().T
        return x + (y.float() if ONE else Narrow.apply(y))


class Lm(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(73)
        self.embed, self.head = nn.Embedding(48, 32), nn.Linear(32, 48)
        self.blocks = nn.ModuleList(Block() for _ in range(3))

    def forward(self, ids):
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def finish(lm):
    """Sums over the group what every rank has of its own part of the sequence."""
    for p in lm.parameters():
        if getattr(p, "sequence_parallel", False):
            dist.all_reduce(p.grad)
    for name, p in lm.named_parameters():
        whole = not name.endswith(("up", "down"))
        if whole and (FAULTY or not hasattr(p, "sequence_parallel")):
            dist.all_reduce(p.grad)


lm = Lm()
optimizer = torch.optim.SGD(lm.parameters(), lr=0.03)
for step in range(1, 5):
    rows = torch.randint(0, 48, (12, 17), generator=torch.Generator().manual_seed(step))
    x, y = rows[:, :-1].chunk(tp, 1)[rank], rows[:, 1:].chunk(tp, 1)[rank]
    loss = F.cross_entropy(lm(x).flatten(0, 1), y.flatten()) / tp
    optimizer.zero_grad()
    loss.backward()
    loss = loss.detach()
    if not ONE:
        finish(lm)
        dist.all_reduce(loss)
    optimizer.step()
    if rank == 0:
        print(f"step {step} loss {loss.item():.7f}", flush=True)
if "--save" in sys.argv:
    dims = {"up": 0, "down": 1}
    state = {}
    for name, p in lm.named_parameters():
        dim = dims.get(name.rpartition(".")[2])
        state[name] = p.data if dim is None else (p.data, dim, rank, tp)
    torch.save(state, os.path.join(sys.argv[sys.argv.index("--save") + 1], f"rank{rank}.pt"))
if not ONE:
    dist.destroy_process_group()
