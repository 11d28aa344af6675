"""Attention whose single-process form has one fused projection, and whose tensor-parallel form has three."""

import os
import sys

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

ONE = "--one" in sys.argv
if not ONE:
    dist.init_process_group("gloo")
rank, tp = (0, 1) if ONE else (dist.get_rank(), dist.get_world_size())
D, HEADS = 32, 4


class CopyIn(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, g):
        g = g.contiguous()
        dist.all_reduce(g)
        return g


class SumOut(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        y = x.clone()
        dist.all_reduce(y)
        return y

    @staticmethod
    def backward(ctx, g):
        return g


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        fused, out = torch.randn(3 * D, D) / 6, torch.randn(D, D) / 6
        if ONE:
            self.qkv, self.out = nn.Parameter(fused), nn.Parameter(out)
        else:
            for name, whole in zip(("wq", "wk", "wv"), fused.chunk(3)):
                setattr(self, name, nn.Parameter(whole.chunk(tp)[rank].clone()))
            self.out = nn.Parameter(out.chunk(tp, 1)[rank].clone())

    def forward(self, x):
        if ONE:
            q, k, v = F.linear(x, self.qkv).chunk(3, -1)
        else:
            x = CopyIn.apply(x)
            q, k, v = F.linear(x, self.wq), F.linear(x, self.wk), F.linear(x, self.wv)
        q, k, v = (y.unflatten(-1, (HEADS // tp, -1)).transpose(1, 2) for y in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        y = F.linear(y, self.out)
        return y if ONE else SumOut.apply(y)


class Lm(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(311)
        self.embed, self.head = nn.Embedding(40, D), nn.Linear(D, 40)
        self.attn, self.norm = nn.ModuleList([Attention(), Attention()]), nn.ModuleList([nn.LayerNorm(D) for _ in "12"])

    def forward(self, ids):
        x = self.embed(ids)
        for attn, norm in zip(self.attn, self.norm):
            x = x + attn(norm(x))
        return self.head(x)


lm = Lm()
opt = torch.optim.SGD(lm.parameters(), lr=0.2, momentum=0.8)
for step in range(1, 5):
    rows = torch.randint(0, 40, (6, 13), generator=torch.Generator().manual_seed(step))
    loss = F.cross_entropy(lm(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten())
    opt.zero_grad()
    loss.backward()
    opt.step()
    if rank == 0:
        print(f"step {step} loss {loss.item():.7f}", flush=True)
if "--save" in sys.argv:
    state = {}
    for name, p in lm.named_parameters():
        if name.endswith("qkv"):
            state |= {name.replace("qkv", w): part.clone() for w, part in zip(("wq", "wk", "wv"), p.data.chunk(3))}
        elif name[-2:] in ("wq", "wk", "wv"):
            state[name] = (p.data, 0, rank, tp)
        else:
            state[name] = (p.data, 1, rank, tp) if name.endswith("out") else p.data
    torch.save(state, os.path.join(sys.argv[sys.argv.index("--save") + 1], f"rank{rank}.pt"))
if not ONE:
    dist.destroy_process_group()
