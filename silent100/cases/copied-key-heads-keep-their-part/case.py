"""Four tensor-parallel ranks, four query heads, two key heads."""

import os
import sys

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

ONE, FAULTY = "--one" in sys.argv, "--faulty" in sys.argv
D, QUERIES, KEYS = 32, 4, 2
rank, tp = 0, 1
if not ONE:
    dist.init_process_group("gloo")
    rank, tp = dist.get_rank(), dist.get_world_size()
    sharers = [dist.new_group([0, 1]), dist.new_group([2, 3])]


def all_reduced(x):
    x = x.clone()
    if tp > 1:
        dist.all_reduce(x)
    return x


class Enter(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, g):
        return all_reduced(g)


class Leave(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return all_reduced(x)

    @staticmethod
    def backward(ctx, g):
        return g


def part(weight, heads, dim=0):
    """This rank's heads; a head that two ranks need is copied."""
    pieces = weight.chunk(heads, dim)
    count = max(heads // tp, 1)
    first = rank * heads // tp
    return nn.Parameter(torch.cat(pieces[first : first + count], dim).clone())


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        size = D // QUERIES
        self.q_proj = part(torch.randn(D, D) / 6, QUERIES)
        self.k_proj = part(torch.randn(KEYS * size, D) / 6, KEYS)
        self.v_proj = part(torch.randn(KEYS * size, D) / 6, KEYS)
        self.o_proj = part(torch.randn(D, D) / 6, QUERIES, 1)

    def forward(self, x):
        x = Enter.apply(x)
        q, k, v = (F.linear(x, w).unflatten(-1, (-1, D // QUERIES)).transpose(1, 2) for w in self.weights())
        times = q.shape[1] // k.shape[1]
        k, v = k.repeat_interleave(times, 1), v.repeat_interleave(times, 1)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        return Leave.apply(F.linear(y, self.o_proj))

    def weights(self):
        return self.q_proj, self.k_proj, self.v_proj


class Lm(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(110)
        self.embed, self.head = nn.Embedding(38, D), nn.Linear(D, 38)
        self.attn, self.norm = nn.ModuleList([Attention(), Attention()]), nn.ModuleList([nn.RMSNorm(D), nn.RMSNorm(D)])

    def forward(self, ids):
        x = self.embed(ids)
        for attn, norm in zip(self.attn, self.norm):
            x = x + attn(norm(x))
        return self.head(x)


lm = Lm()
optimizer = torch.optim.SGD(lm.parameters(), lr=0.3)
for step in range(1, 5):
    rows = torch.randint(0, 38, (6, 11), generator=torch.Generator().manual_seed(step))
    loss = F.cross_entropy(lm(rows[:, :-1]).transpose(1, 2), rows[:, 1:])
    optimizer.zero_grad()
    loss.backward()
    if tp > KEYS and not FAULTY:
        for attn in lm.attn:
            for p in (attn.k_proj, attn.v_proj):
                dist.all_reduce(p.grad, group=sharers[rank // 2])
    optimizer.step()
    if rank == 0:
        print(f"step {step} loss {loss.item():.7f}", flush=True)
if "--save" in sys.argv:
    state = {}
    for name, p in lm.named_parameters():
        kind = name.rpartition(".")[2]
        if kind in ("k_proj", "v_proj"):
            state[name] = (p.data, 0, rank * KEYS // tp, min(KEYS, tp))
        elif kind in ("q_proj", "o_proj"):
            state[name] = (p.data, int(kind == "o_proj"), rank, tp)
        else:
            state[name] = p.data
    torch.save(state, os.path.join(sys.argv[sys.argv.index("--save") + 1], f"rank{rank}.pt"))
if not ONE:
    dist.destroy_process_group()
