"""FSDP2 with an optimizer that keeps row and column factors of the second moment of each matrix."""

import argparse
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

cli = argparse.ArgumentParser()
cli.add_argument("--one", action="store_true")
cli.add_argument("--faulty", action="store_true")
cli.add_argument("--save")
args = cli.parse_args()


class Factored(torch.optim.Optimizer):
    def __init__(self, params, lr, beta=0.8):
        super().__init__(params, {"lr": lr, "beta": beta})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                sharded = isinstance(p, DTensor)
                w = p.to_local() if sharded else p
                g = p.grad.to_local() if sharded else p.grad
                state = self.state[p]
                if p.dim() < 2:
                    state.setdefault("v", torch.zeros_like(g)).lerp_(g * g, 1 - group["beta"])
                    w.sub_(group["lr"] * g / (state["v"].sqrt() + 1e-3))
                    continue
                square = g * g + 1e-12
                column = square.sum(0)
                count = len(g)
                if sharded and not args.faulty:
                    dist.all_reduce(column)
                    count = p.shape[0]
                column /= count
                row = square.mean(1)
                state.setdefault("row", torch.zeros_like(row)).lerp_(row, 1 - group["beta"])
                state.setdefault("column", torch.zeros_like(column)).lerp_(column, 1 - group["beta"])
                v = state["row"][:, None] * state["column"] / state["column"].mean()
                w.sub_(group["lr"] * g / (v.sqrt() + 1e-3))


class Block(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.norm, self.up, self.down = nn.RMSNorm(d), nn.Linear(d, 3 * d), nn.Linear(3 * d, d)

    def forward(self, x):
        return x + self.down(F.relu(self.up(self.norm(x))).square())


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(50, 24), nn.Linear(24, 50)
        self.blocks = nn.ModuleList(Block(24) for _ in range(2))

    def forward(self, ids):
        x = self.embed(ids)
        x = x + x.cumsum(1) / torch.arange(1, ids.shape[1] + 1)[:, None]
        for block in self.blocks:
            x = block(x)
        return self.head(x)


rank, world = 0, 1
torch.manual_seed(818)
net = Net()
if not args.one:
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    for block in net.blocks:
        fully_shard(block)
    fully_shard(net)
optimizer = Factored(net.parameters(), lr=2e-3)
for step in range(1, 5):
    rows = torch.randint(0, 50, (12, 10), generator=torch.Generator().manual_seed(step))[rank::world]
    loss = F.cross_entropy(net(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten())
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    shown = loss.detach().clone()
    if not args.one:
        dist.all_reduce(shown)
    if rank == 0:
        print(f"step {step} loss {shown.item() / world:.7f}", flush=True)
if args.save:
    state = {k: v if args.one else v.full_tensor() for k, v in net.state_dict().items()}
    torch.save(state, os.path.join(args.save, f"rank{rank}.pt"))
if not args.one:
    dist.destroy_process_group()
