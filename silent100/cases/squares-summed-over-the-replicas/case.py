"""Two replicas of two tensor-parallel ranks; feed-forward layers with a norm over their cut hidden width."""

import os
import sys

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

ONE, FAULTY = "--one" in sys.argv, "--faulty" in sys.argv
WIDTH, HIDDEN, OUT = 24, 64, 8

if ONE:
    rank, dp_rank, tp_rank, DP, TP = 0, 0, 0, 1, 1
else:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replica", "cut"))
    replicas, cut = mesh.get_group("replica"), mesh.get_group("cut")
    dp_rank, tp_rank = mesh.get_coordinate()
    DP = TP = 2


class SumBoth(torch.autograd.Function):
    """Sums over a group, in forward and in backward."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        x = x.contiguous().clone()
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx, g):
        g = g.contiguous().clone()
        dist.all_reduce(g, group=ctx.group)
        return g, None


class SumForward(SumBoth):
    @staticmethod
    def backward(ctx, g):
        return g, None


class SumBackward(SumBoth):
    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return x.view_as(x)


class MidNorm(nn.Module):
    def __init__(self):
        super().__init__()
        self.gain = nn.Parameter(torch.ones(HIDDEN // TP))

    def forward(self, x):
        squares = x.square().sum(-1, keepdim=True)
        if TP > 1:
            squares = SumBoth.apply(squares, replicas if FAULTY else cut)
        return x * (squares / HIDDEN + 1e-6).rsqrt() * self.gain


class FeedForward(nn.Module):
    def __init__(self):
        super().__init__()
        self.wi = nn.Parameter((torch.randn(HIDDEN, WIDTH) / 5).chunk(TP)[tp_rank].clone())
        self.mid_norm = MidNorm()
        self.wo = nn.Parameter((torch.randn(WIDTH, HIDDEN) / 8).chunk(TP, 1)[tp_rank].clone())

    def forward(self, x):
        x = x if TP == 1 else SumBackward.apply(x, cut)
        y = self.mid_norm(F.silu(x @ self.wi.T)) @ self.wo.T
        return y if TP == 1 else SumForward.apply(y, cut)


class Regressor(nn.Module):
    def __init__(self):
        super().__init__()
        self.inputs = nn.Linear(10, WIDTH)
        self.trunk = nn.ModuleList(FeedForward() for _ in range(3))
        self.outputs = nn.Linear(WIDTH, OUT)

    def forward(self, x):
        x = self.inputs(x)
        for ff in self.trunk:
            x = x + ff(x)
        return self.outputs(x)


torch.manual_seed(7)
model = Regressor()
optimizer = torch.optim.SGD(model.parameters(), lr=0.03, momentum=0.9)
for step in range(1, 4):
    g = torch.Generator().manual_seed(step)
    x = torch.randn(16, 10, generator=g)
    y = (x[:, :8] * x[:, 2:]).tanh()
    loss = F.mse_loss(model(x[dp_rank::DP]), y[dp_rank::DP])
    optimizer.zero_grad()
    loss.backward()
    shown = loss.detach() / DP
    if not ONE:
        for p in model.parameters():
            dist.all_reduce(p.grad, group=replicas)
            p.grad /= DP
        dist.all_reduce(shown, group=replicas)
    optimizer.step()
    if rank == 0:
        print(f"step {step} loss {shown.item():.7f}", flush=True)
if "--save" in sys.argv:
    dims = {"wi": 0, "wo": 1, "gain": 0}
    state = {
        n: (p.data, dims[n.split(".")[-1]], tp_rank, TP) if n.startswith("trunk") and TP > 1 else p.data
        for n, p in model.named_parameters()
    }
    torch.save(state, os.path.join(sys.argv[sys.argv.index("--save") + 1], f"rank{rank}.pt"))
if not ONE:
    dist.destroy_process_group()
