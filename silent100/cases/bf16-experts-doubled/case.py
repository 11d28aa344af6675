"""Experts over two data ranks (all-gather of tokens, reduce-scatter of outputs) under bfloat16."""

import os
import sys

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

ONE, FAULTY = "--one" in sys.argv, "--faulty" in sys.argv
if not ONE:
    dist.init_process_group("gloo")
RANK, EP = (0, 1) if ONE else (dist.get_rank(), dist.get_world_size())


def every(x):
    parts = [torch.empty_like(x) for _ in range(EP)]
    dist.all_gather(parts, x.contiguous())
    return torch.cat(parts)


def mine(x):
    total = x.float()
    dist.all_reduce(total)
    return total.to(x.dtype).chunk(EP)[RANK]


class Collect(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return every(x)

    @staticmethod
    def backward(ctx, g):
        return mine(g)


class Spread(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return mine(x)

    @staticmethod
    def backward(ctx, g):
        return every(g)


class Moe(nn.Module):
    def __init__(self, dim=32, count=4):
        super().__init__()
        self.norm, self.router = nn.LayerNorm(dim), nn.Linear(dim, count)
        full = torch.randn(count, dim, dim) * 0.2
        self.first = RANK * count // EP
        self.experts = nn.Parameter(full.chunk(EP)[RANK].clone())

    def forward(self, x):
        h = self.norm(x)
        weights = self.router(h.float()).softmax(-1)
        if EP > 1:
            h, weights = Collect.apply(h), Collect.apply(weights)
        own = weights[:, self.first : self.first + len(self.experts)].bfloat16()
        y = torch.stack([h.bfloat16() @ e.bfloat16() for e in self.experts], 1)
        y = (F.gelu(y) * own.unsqueeze(-1)).sum(1)
        return x + (Spread.apply(y) if EP > 1 else y).float()


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.moe1, self.moe2, self.head = nn.Embedding(50, 32), Moe(), Moe(), nn.Linear(32, 50)

    def forward(self, ids):
        return self.head(self.moe2(self.moe1(self.embed(ids.flatten()))))


torch.manual_seed(92)
net = Net()
optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
for step in range(1, 4):
    rows = torch.randint(0, 50, (16, 13), generator=torch.Generator().manual_seed(step))[RANK::EP]
    loss = F.cross_entropy(net(rows[:, :-1]), rows[:, 1:].flatten())
    optimizer.zero_grad()
    loss.backward()
    shown = loss.detach().clone()
    if EP > 1:
        for name, p in net.named_parameters():
            if not name.endswith("experts"):
                dist.all_reduce(p.grad)
            if not (name.endswith("experts") and FAULTY):
                p.grad /= EP
        dist.all_reduce(shown)
    optimizer.step()
    if RANK == 0:
        print(f"step {step} loss {shown.item() / EP:.7f}", flush=True)
if "--save" in sys.argv:
    state = {n: (p.data, 0, RANK, EP) if n.endswith("experts") else p.data for n, p in net.named_parameters()}
    torch.save(state, os.path.join(sys.argv[sys.argv.index("--save") + 1], f"rank{RANK}.pt"))
if not ONE:
    dist.destroy_process_group()
