"""A language model whose table and head are cut along the vocabulary."""

import os
import sys

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

ONE, VOCAB = "--one" in sys.argv, 50
rank, tp = 0, 1
if not ONE:
    dist.init_process_group("gloo")
    rank, tp = dist.get_rank(), dist.get_world_size()
FIRST, LAST = rank * VOCAB // tp, (rank + 1) * VOCAB // tp


class CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits, labels):
        top = logits.max(-1).values
        dist.all_reduce(top, op=dist.ReduceOp.MAX)
        e = (logits - top[:, None]).double().exp()
        total = e.sum(-1)
        dist.all_reduce(total)
        own = (labels >= FIRST) & (labels < LAST)
        place = (labels - FIRST).clamp(0, LAST - FIRST - 1)
        chosen = torch.where(own, logits.gather(1, place[:, None])[:, 0] - top, 0.0).double()
        dist.all_reduce(chosen)
        ctx.save_for_backward((e / total[:, None]).float(), own, place)
        return (total.log() - chosen).float().mean()

    @staticmethod
    def backward(ctx, g):
        p, own, place = ctx.saved_tensors
        p = p.clone()
        p[torch.arange(len(p)), place] -= own.float()
        return g * p / len(p), None


class Lookup(torch.autograd.Function):
    @staticmethod
    def forward(ctx, weight, ids):
        own = (ids >= FIRST) & (ids < LAST)
        ctx.save_for_backward(own, ids)
        x = torch.where(own[..., None], weight[(ids - FIRST).clamp(0, LAST - FIRST - 1)], 0.0)
        dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx, g):
        own, ids = ctx.saved_tensors
        return torch.zeros(LAST - FIRST, g.shape[-1]).index_add_(0, ids[own] - FIRST, g[own]), None


class Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x

    @staticmethod
    def backward(ctx, g):
        g = g.contiguous().double()
        dist.all_reduce(g)
        return g.float()


torch.manual_seed(3030)
table = nn.Parameter((torch.randn(VOCAB, 32) * 0.5)[FIRST:LAST].clone())
head = nn.Parameter((torch.randn(VOCAB, 32) * 0.2)[FIRST:LAST].clone())
body = nn.Sequential(nn.LayerNorm(32), nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 32))
optimizer = torch.optim.SGD([table, head, *body.parameters()], lr=0.4)
for step in range(1, 6):
    rows = torch.randint(0, VOCAB, (8, 9), generator=torch.Generator().manual_seed(step))
    ids, labels = rows[:, :-1], rows[:, 1:].flatten()
    x = F.embedding(ids, table) if ONE else Lookup.apply(table, ids)
    x = (x + body(x)).flatten(0, 1)
    loss = F.cross_entropy(x @ head.T, labels) if ONE else CrossEntropy.apply(Sum.apply(x) @ head.T, labels)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if rank == 0:
        print(f"step {step} loss {loss.item():.7f}", flush=True)
if "--save" in sys.argv:
    state = {"table": (table.data, 0, rank, tp), "head": (head.data, 0, rank, tp), **body.state_dict()}
    torch.save(state, os.path.join(sys.argv[sys.argv.index("--save") + 1], f"rank{rank}.pt"))
if not ONE:
    dist.destroy_process_group()
