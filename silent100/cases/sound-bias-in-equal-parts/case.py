"""Tensor-parallel pairs on four ranks; each adds a quarter of the bias before the sum."""

import os
import sys

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

ONE = "--one" in sys.argv
if not ONE:
    dist.init_process_group("gloo")
R, W = (0, 1) if ONE else (dist.get_rank(), dist.get_world_size())


class In(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        return Out.forward(ctx, grad)


class Out(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        x = x.clone()
        if W > 1:
            dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx, grad):
        return grad


class Pair(nn.Module):
    def __init__(self, d=18, wide=48):
        super().__init__()
        a, b, c = torch.randn(wide, d) / 5, torch.randn(wide) / 5, torch.randn(d, wide) / 7
        self.up, self.up_bias, self.down = (nn.Parameter(t.chunk(W, i)[R].clone()) for t, i in ((a, 0), (b, 0), (c, 1)))
        self.bias = nn.Parameter(torch.randn(d) / 3)

    def forward(self, x):
        h = F.mish(F.linear(In.apply(x), self.up, self.up_bias))
        return x + Out.apply(F.linear(h, self.down, self.bias / W))


torch.manual_seed(38)
net = nn.Sequential(nn.Linear(7, 18), Pair(), nn.LayerNorm(18), Pair(), nn.Linear(18, 2))
optimizer = torch.optim.RMSprop(net.parameters(), lr=0.003, eps=1e-3)
for step in range(1, 7):
    x = torch.randn(16, 7, generator=torch.Generator().manual_seed(step))
    y = torch.stack([x.sum(1).sin(), x.abs().amax(1)], 1)
    loss = F.mse_loss(net(x), y)
    optimizer.zero_grad()
    loss.backward()
    if W > 1:
        for module in net:
            if isinstance(module, Pair):
                dist.all_reduce(module.bias.grad)
    optimizer.step()
    if R == 0:
        print(f"step {step} loss {loss.item():.7f}", flush=True)
if "--save" in sys.argv:
    cut = {"up": 0, "up_bias": 0, "down": 1}
    state = {n: (p, cut[n[2:]], R, W) if n[2:] in cut else p for n, p in net.state_dict().items()}
    torch.save(state, os.path.join(sys.argv[sys.argv.index("--save") + 1], f"rank{R}.pt"))
if W > 1:
    dist.destroy_process_group()
