"""Megatron-like layers in bfloat16."""

import os
import sys

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

one = "--one" in sys.argv
if not one:
    dist.init_process_group("gloo")
rank, tp = (0, 1) if one else (dist.get_rank(), dist.get_world_size())


class Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, late):
        ctx.late = late
        return Sum.over(x) if not late else x.clone()

    @staticmethod
    def backward(ctx, g):
        return Sum.over(g) if ctx.late else g, None

    @staticmethod
    def over(x):
        total = x.float()
        if tp > 1:
            dist.all_reduce(total)
        return total.to(x.dtype)


class Mlp(nn.Module):
    def __init__(self, d=32, h=128):
        super().__init__()
        self.norm = nn.LayerNorm(d)
        self.w1 = nn.Parameter((torch.randn(h, d) * 0.2).chunk(tp)[rank].clone())
        self.w2 = nn.Parameter((torch.randn(d, h) * 0.1).chunk(tp, 1)[rank].clone())

    def forward(self, x):
        h = Sum.apply(self.norm(x).bfloat16(), True)
        y = F.silu(h @ self.w1.bfloat16().T) @ self.w2.bfloat16().T
        return x + Sum.apply(y, False).float()


torch.manual_seed(501)
net = nn.Sequential(nn.Embedding(52, 32), Mlp(), Mlp(), nn.Linear(32, 52))
optimizer = torch.optim.SGD(net.parameters(), lr=0.2)
for step in range(1, 4):
    rows = torch.randint(0, 52, (8, 12), generator=torch.Generator().manual_seed(step))
    loss = F.cross_entropy(net(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if rank == 0:
        print(f"step {step} loss {loss.item():.7f}", flush=True)
if "--save" in sys.argv:
    cut = {"w1": 0, "w2": 1}
    state = {n: (p.data, cut[n[-2:]], rank, tp) if n[-2:] in cut else p.data for n, p in net.named_parameters()}
    torch.save(state, os.path.join(sys.argv[sys.argv.index("--save") + 1], f"rank{rank}.pt"))
if not one:
    dist.destroy_process_group()
