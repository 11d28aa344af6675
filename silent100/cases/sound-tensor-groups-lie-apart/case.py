# Two by two, with the tensor axis outside.
import os
import sys

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

ONE = "--one" in sys.argv
rank, TP, DP = 0, 1, 1
tensor_group = data_group = None
if not ONE:
    dist.init_process_group("gloo")
    rank, TP, DP = dist.get_rank(), 2, 2
    for ranks in ([0, 2], [1, 3]):
        group = dist.new_group(ranks)
        tensor_group = group if rank in ranks else tensor_group
    for ranks in ([0, 1], [2, 3]):
        group = dist.new_group(ranks)
        data_group = group if rank in ranks else data_group
tp, dp = rank // 2, rank % 2


class F_(torch.autograd.Function):
    """Identity forward, sum backward."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, g):
        g = g.clone()
        if TP > 1:
            dist.all_reduce(g, group=tensor_group)
        return g


class G_(torch.autograd.Function):
    """Sum forward, identity backward."""

    @staticmethod
    def forward(ctx, x):
        x = x.clone()
        if TP > 1:
            dist.all_reduce(x, group=tensor_group)
        return x

    @staticmethod
    def backward(ctx, g):
        return g


class Pair(nn.Module):
    def __init__(self, d=20, h=32):
        super().__init__()
        self.norm = nn.LayerNorm(d)
        a, b, c = torch.randn(h, d) / 5, torch.randn(h) / 5, torch.randn(d, h) / 6
        self.a, self.b = (nn.Parameter(w.chunk(TP)[tp].clone()) for w in (a, b))
        self.c, self.d = nn.Parameter(c.chunk(TP, 1)[tp].clone()), nn.Parameter(torch.zeros(d))

    def forward(self, x):
        h = torch.relu(F.linear(F_.apply(self.norm(x)), self.a, self.b))
        return x + G_.apply(h @ self.c.T) + self.d


torch.manual_seed(22)
net = nn.Sequential(nn.Linear(8, 20), Pair(), Pair(), nn.Linear(20, 8))
optimizer = torch.optim.SGD(net.parameters(), lr=0.2, momentum=0.9, dampening=0.1)
for step in range(1, 6):
    x = torch.randn(14, 8, generator=torch.Generator().manual_seed(step)).chunk(DP)[dp]
    loss = F.mse_loss(net(x), x.cos())
    optimizer.zero_grad()
    loss.backward()
    loss = loss.detach()
    if DP > 1:
        for t in [p.grad for p in net.parameters()] + [loss]:
            dist.all_reduce(t, group=data_group)
            t /= DP
    optimizer.step()
    if rank == 0:
        print(f"step {step} loss {loss.item():.7f}", flush=True)
if "--save" in sys.argv:
    state, dims = {}, {"a": 0, "b": 0, "c": 1}
    for name, p in net.named_parameters():
        dim = dims.get(name.rpartition(".")[2])
        state[name] = p.data if dim is None else (p.data, dim, tp, TP)
    torch.save(state, os.path.join(sys.argv[sys.argv.index("--save") + 1], f"rank{rank}.pt"))
if not ONE:
    dist.destroy_process_group()
