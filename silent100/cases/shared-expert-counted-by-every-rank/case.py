"""A layer of experts with one that all words pass: routed ones are dealt out to ranks, which all see the same words."""

import os
import sys

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

ONE, FAULTY = "--one" in sys.argv, "--faulty" in sys.argv
if not ONE:
    dist.init_process_group("gloo")
rank, world = (0, 1) if ONE else (dist.get_rank(), dist.get_world_size())

VOCAB, DIM, EXPERTS = 26, 16, 6


class Enter(torch.autograd.Function):
    """Identity; the gradient is summed over ranks."""

    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, g):
        g = g.contiguous().clone()
        if world > 1:
            dist.all_reduce(g)
        return g


class Leave(torch.autograd.Function):
    """Sums partial outputs; the gradient passes."""

    @staticmethod
    def forward(ctx, x):
        x = x.contiguous().clone()
        if world > 1:
            dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx, g):
        return g


class Expert(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(DIM, 24), nn.Linear(24, DIM)

    def forward(self, x):
        return self.down(F.silu(self.up(x)))


class Moe(nn.Module):
    def __init__(self):
        super().__init__()
        self.router, self.shared = nn.Linear(DIM, EXPERTS, bias=False), Expert()
        drawn = [Expert() for _ in range(EXPERTS)]
        self.experts = nn.ModuleDict({str(i): e for i, e in enumerate(drawn) if i * world // EXPERTS == rank})

    def forward(self, x):
        weights, chosen = self.router(x).softmax(-1).topk(2)
        weights, inside = Enter.apply(weights), Enter.apply(x)
        routed = torch.zeros_like(x)
        for i, expert in self.experts.items():
            share = (weights * (chosen == int(i))).sum(-1, keepdim=True)
            routed = routed + share * expert(inside)
        if FAULTY:
            return Leave.apply(routed + self.shared(x))
        return Leave.apply(routed) + self.shared(x)


class Lm(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.rnn = nn.Embedding(VOCAB, DIM), nn.GRU(DIM, DIM, batch_first=True)
        self.norm, self.moe, self.head = nn.LayerNorm(DIM), Moe(), nn.Linear(DIM, VOCAB)

    def forward(self, ids):
        x = self.rnn(self.words(ids))[0]
        return self.head(x + self.moe(self.norm(x)))


torch.manual_seed(45)
lm = Lm()
optimizer = torch.optim.Adam(lm.parameters(), lr=4e-3, eps=1e-4)
for step in range(1, 6):
    rows = torch.randint(0, VOCAB, (8, 10), generator=torch.Generator().manual_seed(step))
    loss = F.cross_entropy(lm(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if rank == 0:
        print(f"step {step} loss {loss.item():.7f}", flush=True)
if "--save" in sys.argv:
    torch.save(lm.state_dict(), os.path.join(sys.argv[sys.argv.index("--save") + 1], f"rank{rank}.pt"))
if world > 1:
    dist.destroy_process_group()
