"""A click model in the style of DLRM: tables are model parallel, the dense part is data parallel."""

import argparse
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

cli = argparse.ArgumentParser()
cli.add_argument("--one", action="store_true")
cli.add_argument("--save")
args = cli.parse_args()
rank, world = 0, 1
if not args.one:
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
TABLES, D = 4, 12


class Deal(torch.autograd.Function):
    """(rows of all, own tables, d) -> (own rows, all tables, d)."""

    @staticmethod
    def forward(ctx, x):
        pieces = [piece.contiguous() for piece in x.chunk(world)]
        got = [torch.empty_like(pieces[0]) for _ in range(world)]
        dist.all_to_all(got, pieces)
        return torch.cat(got, 1)

    @staticmethod
    def backward(ctx, g):
        pieces = [piece.contiguous() for piece in g.chunk(world, 1)]
        got = [torch.empty_like(pieces[0]) for _ in range(world)]
        dist.all_to_all(got, pieces)
        return torch.cat(got)


class Dlrm(nn.Module):
    def __init__(self):
        super().__init__()
        weights = torch.randn(TABLES, 60, D) * 0.3
        own = range(rank * TABLES // world, (rank + 1) * TABLES // world)
        self.tables = nn.ModuleDict({str(i): nn.Embedding.from_pretrained(weights[i], freeze=False) for i in own})
        self.bottom = nn.Sequential(nn.Linear(5, D), nn.ReLU())
        self.top = nn.Sequential(nn.Linear(D + (TABLES + 1) * TABLES // 2, 24), nn.ReLU(), nn.Linear(24, 1))

    def forward(self, numbers, ids):
        """Takes own rows of numbers and every row of ids."""
        x = torch.stack([table(ids[:, int(i)]) for i, table in self.tables.items()], 1)
        x = Deal.apply(x) if world > 1 else x
        dense = self.bottom(numbers)
        x = torch.cat([dense[:, None], x], 1)
        i, j = torch.triu_indices(TABLES + 1, TABLES + 1, 1)
        crossed = (x @ x.transpose(1, 2))[:, i, j]
        return self.top(torch.cat([dense, crossed], 1)).squeeze(1)


torch.manual_seed(700)
net = Dlrm()
optimizer = torch.optim.Adagrad(net.parameters(), lr=0.05, eps=1e-4)
for step in range(1, 6):
    g = torch.Generator().manual_seed(step)
    numbers, ids = torch.randn(16, 5, generator=g), torch.randint(0, 60, (16, TABLES), generator=g)
    clicks = torch.randint(0, 2, (16,), generator=g).float()
    rows = slice(rank * 16 // world, (rank + 1) * 16 // world)
    loss = F.binary_cross_entropy_with_logits(net(numbers[rows], ids), clicks[rows]) / world
    optimizer.zero_grad()
    loss.backward()
    loss = loss.detach()
    if world > 1:
        for p in [*net.bottom.parameters(), *net.top.parameters()]:
            dist.all_reduce(p.grad)
        dist.all_reduce(loss)
    optimizer.step()
    if rank == 0:
        print(f"step {step} loss {loss.item():.7f}", flush=True)
if args.save:
    torch.save(net.state_dict(), os.path.join(args.save, f"rank{rank}.pt"))
if world > 1:
    dist.destroy_process_group()
