"""Noisy top-1 routing. Expert ranks hold all tokens and add up what their experts make of them."""

import os
import sys

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

ONE, FAULTY = "--one" in sys.argv, "--faulty" in sys.argv
rank, ep = 0, 1
if not ONE:
    dist.init_process_group("gloo")
    rank, ep = dist.get_rank(), dist.get_world_size()
noise = torch.Generator().manual_seed(1 if ONE else 2 + FAULTY * rank)


class Both(torch.autograd.Function):
    """Sums in forward or in backward."""

    @staticmethod
    def forward(ctx, x, forward):
        ctx.backward_too = not forward
        x = x.clone()
        if ep > 1 and forward:
            dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx, g):
        g = g.clone()
        if ep > 1 and ctx.backward_too:
            dist.all_reduce(g)
        return g, None


class Moe(nn.Module):
    def __init__(self, d=32, experts=8):
        super().__init__()
        self.gate, self.per_rank = nn.Linear(d, experts), experts // ep
        w = torch.randn(experts, d, d) * 0.05
        self.experts = nn.Parameter(w.chunk(ep)[rank].clone())

    def forward(self, x):
        logits = self.gate(x)
        chosen = (logits + 0.5 * torch.randn(logits.shape, generator=noise)).argmax(-1)
        weight = logits.softmax(-1).gather(1, chosen[:, None])
        inside, weight = Both.apply(x, False), Both.apply(weight, False)
        own = (chosen // self.per_rank == rank).nonzero()[:, 0]
        y = torch.einsum("nd,nde->ne", inside[own], self.experts[chosen[own] % self.per_rank]) * weight[own]
        return x + Both.apply(torch.zeros_like(x).index_add(0, own, y), True)


class Lm(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(64)
        self.embed, self.head = nn.Embedding(60, 32), nn.Linear(32, 60)
        self.moes = nn.ModuleList([Moe(), Moe()])

    def forward(self, ids):
        x = self.embed(ids.flatten())
        for moe in self.moes:
            x = moe(x)
        return self.head(x)


lm = Lm()
optimizer = torch.optim.SGD(lm.parameters(), lr=0.05)
for step in range(1, 5):
    rows = torch.randint(0, 60, (16, 13), generator=torch.Generator().manual_seed(step))
    loss = F.cross_entropy(lm(rows[:, :-1]), rows[:, 1:].flatten())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if rank == 0:
        print(f"step {step} loss {loss.item():.7f}", flush=True)
if "--save" in sys.argv:
    state = {n: (p.data, 0, rank, ep) if n.endswith("experts") else p.data for n, p in lm.named_parameters()}
    torch.save(state, os.path.join(sys.argv[sys.argv.index("--save") + 1], f"rank{rank}.pt"))
if not ONE:
    dist.destroy_process_group()
