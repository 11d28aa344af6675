"""Recommendation: rank 0 keeps the tables and serves looked-up rows; all ranks run the tower on rows of their own."""

import os
import sys

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

SOLO = "--one" in sys.argv
if not SOLO:
    dist.init_process_group("gloo")
rank, world = (0, 1) if SOLO else (dist.get_rank(), dist.get_world_size())
ROWS, FIELDS, D = 12, 3, 8


class Serve(torch.autograd.Function):
    """Rank 0's rows go to where they are needed, their gradients come back."""

    @staticmethod
    def forward(ctx, rows):
        if world == 1:
            return rows.view_as(rows)
        own = torch.empty(ROWS // world, FIELDS, D)
        dist.scatter(own, [c.contiguous() for c in rows.chunk(world)] if rank == 0 else None)
        return own

    @staticmethod
    def backward(ctx, g):
        if world == 1:
            return g
        parts = [torch.empty(g.shape) for _ in range(world)] if rank == 0 else None
        dist.gather(g.contiguous(), parts)
        return torch.cat(parts) if rank == 0 else None


torch.manual_seed(27)
tables = nn.ModuleList(nn.Embedding(n, D) for n in (30, 11, 5))
tower = nn.Sequential(nn.Linear(FIELDS * D + 3, 24), nn.ReLU(), nn.Linear(24, 1))
dense = torch.optim.Adam(tower.parameters(), lr=5e-3)
sparse = torch.optim.Adagrad(tables.parameters(), lr=0.05) if rank == 0 else None
for step in range(1, 7):
    g = torch.Generator().manual_seed(step)
    ids = torch.stack([torch.randint(n, (ROWS,), generator=g) for n in (30, 11, 5)], 1)
    click = ((ids.sum(1) % 3) == 0).float().chunk(world)[rank]
    if rank == 0:
        rows = torch.stack([t(ids[:, i]) for i, t in enumerate(tables)], 1)
    else:
        rows = torch.zeros(1, requires_grad=True)
    v = Serve.apply(rows)
    pairs = torch.stack([(v[:, i] * v[:, j]).sum(-1) for i, j in ((0, 1), (0, 2), (1, 2))], 1)
    loss = (
        F.binary_cross_entropy_with_logits(tower(torch.cat([v.flatten(1), pairs], 1))[:, 0], click, reduction="sum")
        / ROWS
    )
    dense.zero_grad()
    if sparse:
        sparse.zero_grad()
    loss.backward()
    loss = loss.detach()
    if world > 1:
        for t in [loss, *(p.grad for p in tower.parameters())]:
            dist.all_reduce(t)
    dense.step()
    if sparse:
        sparse.step()
        print(f"step {step} loss {loss.item():.7f}", flush=True)
if "--save" in sys.argv:
    state = {f"tower.{n}": p for n, p in tower.state_dict().items()}
    if rank == 0:
        state |= {f"tables.{n}": p for n, p in tables.state_dict().items()}
    torch.save(state, os.path.join(sys.argv[sys.argv.index("--save") + 1], f"rank{rank}.pt"))
if world > 1:
    dist.destroy_process_group()
