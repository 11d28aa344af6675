# Grouped-query attention, tensor parallel: eight query heads, four key heads, two ranks.
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
rank, tp = 0, 1
if not args.one:
    dist.init_process_group("gloo")
    rank, tp = dist.get_rank(), dist.get_world_size()
D, HEADS, KEYS = 48, 8, 4


class Summed(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, now):
        ctx.later = not now
        y = x.float()
        if tp > 1 and now:
            dist.all_reduce(y)
        return y.to(x.dtype)

    @staticmethod
    def backward(ctx, g):
        total = g.float()
        if tp > 1 and ctx.later:
            dist.all_reduce(total)
        return total.to(g.dtype), None


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        size = D // HEADS
        q, kv = torch.randn(D, D) / D**0.5, torch.randn(2, KEYS * size, D) / D**0.5
        self.q = nn.Parameter(q.chunk(tp)[rank].clone())
        self.k, self.v = (nn.Parameter(w.chunk(tp)[rank].clone()) for w in kv)
        self.out = nn.Parameter((torch.randn(D, D) * 0.001).chunk(tp, 1)[rank].clone())

    def repeat(self, x):
        times = HEADS // KEYS
        if args.faulty:
            return x.repeat(1, times, 1, 1)
        return x.repeat_interleave(times, 1)

    def forward(self, x):
        x = Summed.apply(x.bfloat16(), False)
        q, k, v = (x @ w.bfloat16().T for w in (self.q, self.k, self.v))
        q, k, v = (t.unflatten(-1, (-1, D // HEADS)).transpose(1, 2) for t in (q, k, v))
        y = F.scaled_dot_product_attention(q, self.repeat(k), self.repeat(v), is_causal=True)
        return Summed.apply(y.transpose(1, 2).flatten(2) @ self.out.bfloat16().T, True).float()


class Lm(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(50, D), nn.Linear(D, 50)
        self.norms = nn.ModuleList(nn.LayerNorm(D) for _ in range(2))
        self.attn = nn.ModuleList(Attention() for _ in range(2))

    def forward(self, ids):
        x = self.embed(ids)
        for norm, attn in zip(self.norms, self.attn):
            x = x + attn(norm(x))
        return self.head(x)


torch.manual_seed(66)
lm = Lm()
optimizer = torch.optim.SGD(lm.parameters(), lr=0.02)
for step in range(1, 5):
    rows = torch.randint(0, 50, (12, 15), generator=torch.Generator().manual_seed(step))
    loss = F.cross_entropy(lm(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if rank == 0:
        print(f"step {step} loss {loss.item():.7f}", flush=True)
if args.save:
    cut = {"q": 0, "k": 0, "v": 0, "out": 1}
    state = {}
    for name, p in lm.named_parameters():
        dim = cut.get(name.rpartition(".")[2])
        state[name] = p.data if dim is None else (p.data, dim, rank, tp)
    torch.save(state, os.path.join(args.save, f"rank{rank}.pt"))
if tp > 1:
    dist.destroy_process_group()
