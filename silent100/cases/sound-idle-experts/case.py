"""Two of six experts are never chosen; ranks hold three each."""

import os
import sys

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

ONE = "--one" in sys.argv
if not ONE:
    dist.init_process_group("gloo")
RANK, EP = (0, 1) if ONE else (dist.get_rank(), dist.get_world_size())


class Both(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, late):
        ctx.late = late
        x = x.clone()
        if EP > 1 and not late:
            dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx, g):
        g = g.clone()
        if EP > 1 and ctx.late:
            dist.all_reduce(g)
        return g, None


class Moe(nn.Module):
    def __init__(self, dim=26, experts=6):
        super().__init__()
        self.router = nn.Linear(dim, experts)
        with torch.no_grad():
            self.router.bias[1] = self.router.bias[4] = -50.0
        self.first = RANK * experts // EP
        self.w = nn.Parameter((torch.randn(experts, dim, dim) * 0.2).chunk(EP)[RANK].clone())

    def forward(self, x):
        probs = Both.apply(self.router(x).softmax(-1), True)
        chosen = probs.argmax(-1)
        h, y = Both.apply(x, True), torch.zeros_like(x)
        for slot in range(len(self.w)):
            e = self.first + slot
            picked = (chosen == e).nonzero().squeeze(1)
            y = y.index_add(0, picked, torch.relu(h[picked] @ self.w[slot]) * probs[picked, e, None])
        return x + Both.apply(y, False)


torch.manual_seed(48)
net = nn.Sequential(nn.Linear(8, 26), Moe(), Moe(), nn.Linear(26, 8))
optimizer = torch.optim.AdamW(net.parameters(), lr=5e-3, eps=1e-4, weight_decay=0.1)
for step in range(1, 5):
    x = torch.randn(20, 8, generator=torch.Generator().manual_seed(step))
    loss = F.mse_loss(net(x), x.abs())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if RANK == 0:
        print(f"step {step} loss {loss.item():.7f}", flush=True)
if "--save" in sys.argv:
    state = {n: (p.data, 0, RANK, EP) if n.endswith(".w") else p.data for n, p in net.named_parameters()}
    torch.save(state, os.path.join(sys.argv[sys.argv.index("--save") + 1], f"rank{RANK}.pt"))
if not ONE:
    dist.destroy_process_group()
