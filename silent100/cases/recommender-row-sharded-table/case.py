import argparse
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--one", action="store_true")
parser.add_argument("--faulty", action="store_true")
parser.add_argument("--save")
args = parser.parse_args()
if not args.one:
    dist.init_process_group("gloo")
rank, world = (0, 1) if args.one else (dist.get_rank(), dist.get_world_size())
torch.manual_seed(31)

ITEMS = 40


class Pool(torch.autograd.Function):
    """Sum the bags of all ranks' rows."""

    @staticmethod
    def forward(ctx, x):
        x = x.clone()
        if world > 1:
            dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx, grad):
        grad = grad.contiguous().clone()
        if args.faulty:
            dist.all_reduce(grad)
        return grad


class ShardedBag(nn.Module):
    def __init__(self, rows, width):
        super().__init__()
        self.rows = rows // world
        self.weight = nn.Parameter(torch.randn(rows, width)[rank * self.rows : (rank + 1) * self.rows].clone())

    def forward(self, ids):
        local = ids - rank * self.rows
        here = (local >= 0) & (local < self.rows)
        found = self.weight[local.clamp(0, self.rows - 1)] * here[..., None]
        return Pool.apply(found.sum(1))


class Ranker(nn.Module):
    def __init__(self):
        super().__init__()
        self.bottom = nn.Linear(5, 8)
        self.table = ShardedBag(ITEMS, 8)
        self.top = nn.Sequential(nn.Linear(17, 16), nn.ReLU(), nn.Linear(16, 1))

    def forward(self, dense, ids):
        a, b = torch.relu(self.bottom(dense)), self.table(ids)
        return self.top(torch.cat([a, b, (a * b).sum(-1, keepdim=True)], -1)).squeeze(-1)


model = Ranker()
opt = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(1, 9):
    g = torch.Generator().manual_seed(7 * step)
    dense = torch.randn(16, 5, generator=g)
    ids = torch.randint(0, ITEMS, (16, 4), generator=g)
    clicked = ((ids % 3 == 0).sum(1) + dense[:, 0] > 1).float()
    loss = F.binary_cross_entropy_with_logits(model(dense, ids), clicked)
    opt.zero_grad()
    loss.backward()
    opt.step()
    if rank == 0:
        print(f"step {step} loss {loss.item():.7f}", flush=True)

if args.save:
    os.makedirs(args.save, exist_ok=True)
    state = {name: (p, 0, rank, world) if p is model.table.weight else p for name, p in model.named_parameters()}
    torch.save(state, f"{args.save}/rank{rank}.pt")
if not args.one:
    dist.destroy_process_group()
