# Multi-query attention under tensor parallelism.
import os
import sys

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

ONE = "--one" in sys.argv
if not ONE:
    dist.init_process_group("gloo")
RANK, TP = (0, 1) if ONE else (dist.get_rank(), dist.get_world_size())


class Reduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, late):
        ctx.late = late
        x = x.clone()
        if TP > 1 and not late:
            dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx, g):
        g = g.clone()
        if TP > 1 and ctx.late:
            dist.all_reduce(g)
        return g, None


class Mqa(nn.Module):
    def __init__(self, d=32, heads=4):
        super().__init__()
        self.heads, self.size = heads // TP, d // heads
        wq, wo = torch.randn(d, d) / 6, torch.randn(d, d) / 6
        self.wq, self.wo = nn.Parameter(wq.chunk(TP)[RANK].clone()), nn.Parameter(wo.chunk(TP, 1)[RANK].clone())
        self.wkv = nn.Parameter(torch.randn(2 * self.size, d) / 6)

    def forward(self, x):
        x = Reduce.apply(x, True)
        q = (x @ self.wq.T).unflatten(-1, (self.heads, self.size)).transpose(1, 2)
        k, v = ((x @ self.wkv.T).unsqueeze(1)).chunk(2, -1)
        y = F.scaled_dot_product_attention(q, k.expand_as(q), v.expand_as(q), is_causal=True)
        return Reduce.apply(y.transpose(1, 2).flatten(2) @ self.wo.T, False)


class Lm(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(4)
        self.embed, self.head = nn.Embedding(36, 32), nn.Linear(32, 36)
        self.attn, self.norm = nn.ModuleList([Mqa(), Mqa()]), nn.ModuleList([nn.LayerNorm(32), nn.LayerNorm(32)])

    def forward(self, ids):
        x = self.embed(ids)
        for attn, norm in zip(self.attn, self.norm):
            x = x + attn(norm(x))
        return self.head(x)


lm = Lm()
optimizer = torch.optim.SGD(lm.parameters(), lr=0.3)
for step in range(1, 5):
    rows = torch.randint(0, 36, (6, 12), generator=torch.Generator().manual_seed(step))
    loss = F.cross_entropy(lm(rows[:, :-1]).transpose(1, 2), rows[:, 1:])
    optimizer.zero_grad()
    loss.backward()
    if TP > 1:
        for attn in lm.attn:
            dist.all_reduce(attn.wkv.grad)
    optimizer.step()
    if RANK == 0:
        print(f"step {step} loss {loss.item():.7f}", flush=True)
if "--save" in sys.argv:
    cut = {"wq": 0, "wo": 1}
    state = {n: (p.data, cut[n[-2:]], RANK, TP) if n[-2:] in cut else p.data for n, p in lm.named_parameters()}
    torch.save(state, os.path.join(sys.argv[sys.argv.index("--save") + 1], f"rank{RANK}.pt"))
if not ONE:
    dist.destroy_process_group()
