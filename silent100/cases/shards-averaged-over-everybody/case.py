"""Two data ranks by two tensor-parallel ranks."""

import argparse
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

cli = argparse.ArgumentParser()
cli.add_argument("--one", action="store_true")
cli.add_argument("--faulty", action="store_true")
cli.add_argument("--save")
args = cli.parse_args()


class Groups:
    """World of four: tensor-parallel pairs (0, 1), (2, 3); data pairs (0, 2), (1, 3)."""

    def __init__(self):
        self.tp_rank = self.dp_rank = self.rank = 0
        self.tp_size = self.dp_size = 1
        if args.one:
            return
        dist.init_process_group("gloo")
        self.rank = dist.get_rank()
        self.tp_size = self.dp_size = 2
        self.tp_rank, self.dp_rank = self.rank % 2, self.rank // 2
        tp = [dist.new_group(pair) for pair in ([0, 1], [2, 3])]
        dp = [dist.new_group(pair) for pair in ([0, 2], [1, 3])]
        self.tp, self.dp = tp[self.dp_rank], dp[self.tp_rank]


groups = Groups()


class Enter(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, g):
        g = g.clone()
        if not args.one:
            dist.all_reduce(g, group=groups.tp)
        return g


class Exit(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        x = x.clone()
        if not args.one:
            dist.all_reduce(x, group=groups.tp)
        return x

    @staticmethod
    def backward(ctx, g):
        return g


class TpMlp(nn.Module):
    def __init__(self, d, h):
        super().__init__()
        self.norm = nn.LayerNorm(d)
        w1, w2 = torch.randn(h, d) / d**0.5, torch.randn(d, h) / h**0.5
        self.w1 = nn.Parameter(w1.chunk(groups.tp_size)[groups.tp_rank].clone())
        self.w2 = nn.Parameter(w2.chunk(groups.tp_size, 1)[groups.tp_rank].clone())

    def forward(self, x):
        return x + Exit.apply(F.silu(Enter.apply(self.norm(x)) @ self.w1.T) @ self.w2.T)


torch.manual_seed(28)
model = nn.Sequential(nn.Embedding(45, 32), TpMlp(32, 64), TpMlp(32, 64), nn.Linear(32, 45))
optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
for step in range(1, 5):
    rows = torch.randint(0, 45, (8, 9), generator=torch.Generator().manual_seed(step))[groups.dp_rank :: groups.dp_size]
    loss = F.cross_entropy(model(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten())
    optimizer.zero_grad()
    loss.backward()
    shown = loss.detach().clone()
    if not args.one:
        for p in model.parameters():
            group = None if args.faulty else groups.dp
            dist.all_reduce(p.grad, group=group)
            p.grad /= dist.get_world_size(group)
        dist.all_reduce(shown, group=groups.dp)
    optimizer.step()
    if groups.rank == 0:
        print(f"step {step} loss {shown.item() / groups.dp_size:.7f}", flush=True)
if args.save:
    cut = {"w1": 0, "w2": 1}
    state = {
        n: (p.data, cut[n[-2:]], groups.tp_rank, groups.tp_size) if n[-2:] in cut else p.data
        for n, p in model.named_parameters()
    }
    torch.save(state, os.path.join(args.save, f"rank{groups.rank}.pt"))
if not args.one:
    dist.destroy_process_group()
