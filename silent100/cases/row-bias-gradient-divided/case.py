"""Rows over ranks; each partial output carries its part of the bias."""

import os
import sys

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

one, faulty = "--one" in sys.argv, "--faulty" in sys.argv
rank, tp = 0, 1
if not one:
    dist.init_process_group("gloo")
    rank, tp = dist.get_rank(), dist.get_world_size()


class Into(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, g):
        g = g.contiguous().clone()
        if tp > 1:
            dist.all_reduce(g)
        return g


class OutOf(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        x = x.contiguous().clone()
        if tp > 1:
            dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx, g):
        return g


class Rowwise(nn.Module):
    def __init__(self, linear):
        super().__init__()
        self.weight = nn.Parameter(linear.weight.data.chunk(tp, 1)[rank].clone())
        self.bias = nn.Parameter(linear.bias.data.clone())

    def forward(self, x):
        part = self.bias / tp
        if not faulty:
            part = self.bias + (part - self.bias).detach()
        return OutOf.apply(F.linear(x, self.weight, part))


class Colwise(nn.Module):
    def __init__(self, linear):
        super().__init__()
        self.weight = nn.Parameter(linear.weight.data.chunk(tp)[rank].clone())

    def forward(self, x):
        return F.linear(Into.apply(x), self.weight)


class Ffn(nn.Module):
    def __init__(self, d=30, h=64):
        super().__init__()
        self.w_in, self.w_out = Colwise(nn.Linear(d, h, bias=False)), Rowwise(nn.Linear(h, d))

    def forward(self, x):
        return x + self.w_out(F.gelu(self.w_in(x)))


torch.manual_seed(88)
net = nn.Sequential(nn.Linear(9, 30), Ffn(), Ffn(), nn.Linear(30, 9))
optimizer = torch.optim.SGD(net.parameters(), lr=0.3)
for step in range(1, 5):
    x = torch.randn(24, 9, generator=torch.Generator().manual_seed(step))
    loss = F.mse_loss(net(x), x.sort(1).values)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if rank == 0:
        print(f"step {step} loss {loss.item():.7f}", flush=True)
if "--save" in sys.argv:
    cut = {"w_in.weight": 0, "w_out.weight": 1}
    state = {}
    for name, p in net.named_parameters():
        tail = ".".join(name.split(".")[-2:])
        state[name] = (p.data, cut[tail], rank, tp) if tail in cut else p.data
    torch.save(state, os.path.join(sys.argv[sys.argv.index("--save") + 1], f"rank{rank}.pt"))
if not one:
    dist.destroy_process_group()
