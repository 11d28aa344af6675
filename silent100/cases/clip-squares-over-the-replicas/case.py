"""Two replicas of two tensor-parallel ranks: a residual MLP classifier with dropout and a global gradient norm."""

import argparse
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh

parser = argparse.ArgumentParser()
parser.add_argument("--one", action="store_true")
parser.add_argument("--faulty", action="store_true")
parser.add_argument("--save")
args = parser.parse_args()


class Grid:
    """Which rows and which pieces of weights this process has."""

    def __init__(self):
        self.dp_rank = self.tp_rank = 0
        self.dp = self.tp = 1
        self.dp_group = self.tp_group = None
        if not args.one:
            dist.init_process_group("gloo")
            mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
            (self.dp_rank, self.tp_rank), self.dp, self.tp = mesh.get_coordinate(), 2, 2
            self.dp_group, self.tp_group = mesh.get_group("dp"), mesh.get_group("tp")


grid = Grid()


class SumForward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        x = x.clone()
        if grid.tp_group is not None:
            dist.all_reduce(x, group=grid.tp_group)
        return x

    @staticmethod
    def backward(ctx, g):
        return g


class SumBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, g):
        g = g.clone()
        if grid.tp_group is not None:
            dist.all_reduce(g, group=grid.tp_group)
        return g


class ParallelMLP(nn.Module):
    def __init__(self, width, hidden):
        super().__init__()
        up, down = nn.Linear(width, hidden), nn.Linear(hidden, width, bias=False)
        self.up_weight = nn.Parameter(up.weight.detach().chunk(grid.tp)[grid.tp_rank].clone())
        self.up_bias = nn.Parameter(up.bias.detach().chunk(grid.tp)[grid.tp_rank].clone())
        self.down_weight = nn.Parameter(down.weight.detach().chunk(grid.tp, 1)[grid.tp_rank].clone())

    def forward(self, x):
        h = F.gelu(F.linear(SumBackward.apply(x), self.up_weight, self.up_bias))
        return SumForward.apply(F.linear(h, self.down_weight))


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Linear(20, 32)
        self.norms = nn.ModuleList(nn.LayerNorm(32) for _ in range(3))
        self.mlps = nn.ModuleList(ParallelMLP(32, 64) for _ in range(3))
        self.drop = nn.Dropout(0.2)
        self.head = nn.Linear(32, 6)

    def forward(self, x):
        x = self.stem(x)
        for norm, mlp in zip(self.norms, self.mlps):
            x = x + self.drop(mlp(norm(x)))
        return self.head(x)


def is_cut(name):
    return name.split(".")[-1] in ("up_weight", "up_bias", "down_weight")


def clip_grad_norm(named, max_norm):
    squares = {True: torch.zeros(()), False: torch.zeros(())}
    for name, p in named:
        squares[is_cut(name)] += p.grad.square().sum()
    if grid.tp_group is not None:
        dist.all_reduce(squares[True], group=grid.dp_group if args.faulty else grid.tp_group)
    norm = (squares[True] + squares[False]).sqrt()
    for _, p in named:
        p.grad.mul_(min(1.0, max_norm / (norm.item() + 1e-6)))


torch.manual_seed(41)
model = Classifier()
named = list(model.named_parameters())
optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)
torch.manual_seed(500 + grid.dp_rank)
for step in range(1, 6):
    g = torch.Generator().manual_seed(step)
    x = torch.randn(32, 20, generator=g)
    y = x[:, :6].argmax(-1)
    x, y = x.chunk(grid.dp)[grid.dp_rank], y.chunk(grid.dp)[grid.dp_rank]
    loss = F.cross_entropy(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    shown = loss.detach() / grid.dp
    if grid.dp_group is not None:
        dist.all_reduce(shown, group=grid.dp_group)
        for _, p in named:
            dist.all_reduce(p.grad, group=grid.dp_group)
            p.grad /= grid.dp
    clip_grad_norm(named, 0.2)
    optimizer.step()
    if grid.dp_rank == grid.tp_rank == 0:
        print(f"step {step} loss {shown.item():.7f}", flush=True)
if args.save:
    state = {}
    for name, p in named:
        dim = 1 if "down" in name else 0
        state[name] = (p.detach(), dim, grid.tp_rank, 2) if is_cut(name) and grid.tp > 1 else p.detach()
    torch.save(state, os.path.join(args.save, f"rank{grid.dp_rank * grid.tp + grid.tp_rank}.pt"))
if not args.one:
    dist.destroy_process_group()
