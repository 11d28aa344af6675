"""Context parallelism with learned positions, gathered keys and bfloat16 compute."""

import os
import sys

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

ONE, FAULTY = "--one" in sys.argv, "--faulty" in sys.argv
LENGTH, D, VOCAB = 24, 32, 52
rank, cp = 0, 1
if not ONE:
    dist.init_process_group("gloo")
    rank, cp = dist.get_rank(), dist.get_world_size()
FIRST = rank * LENGTH // cp


class Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        parts = [torch.empty_like(x, dtype=torch.float32) for _ in range(cp)]
        dist.all_gather(parts, x.float().contiguous())
        return torch.cat(parts, 2).to(x.dtype)

    @staticmethod
    def backward(ctx, g):
        total = g.float().contiguous()
        dist.all_reduce(total)
        return total.chunk(cp, 2)[rank].to(g.dtype)


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.q, self.kv = nn.LayerNorm(D), nn.Linear(D, D, bias=False), nn.Linear(D, 2 * D, bias=False)
        self.out = nn.Linear(D, D, bias=False)

    def forward(self, x):
        h = self.norm(x)
        q, k, v = (t.unflatten(-1, (4, -1)).transpose(1, 2) for t in (self.q(h), *self.kv(h).chunk(2, -1)))
        if cp > 1:
            k, v = Gather.apply(k), Gather.apply(v)
        mask = torch.arange(FIRST, FIRST + x.shape[1])[:, None] >= torch.arange(LENGTH)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return x + self.out(y.transpose(1, 2).flatten(2))


class Lm(nn.Module):
    def __init__(self):
        super().__init__()
        self.tok, self.pos = nn.Embedding(VOCAB, D), nn.Embedding(LENGTH, D)
        nn.init.normal_(self.pos.weight, std=0.002)
        self.layers, self.head = nn.ModuleList([Attention(), Attention()]), nn.Linear(D, VOCAB)

    def forward(self, ids):
        start = max(FIRST - 1, 0) if FAULTY else FIRST
        x = self.tok(ids) + self.pos(torch.arange(start, start + ids.shape[1]))
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


torch.manual_seed(606)
lm = Lm()
optimizer = torch.optim.SGD(lm.parameters(), lr=0.02)
for step in range(1, 5):
    rows = torch.randint(0, VOCAB, (8, LENGTH + 1), generator=torch.Generator().manual_seed(step))
    own = slice(FIRST, FIRST + LENGTH // cp)
    with torch.autocast("cpu", torch.bfloat16):
        logits = lm(rows[:, :-1][:, own])
    loss = F.cross_entropy(logits.float().flatten(0, 1), rows[:, 1:][:, own].flatten()) / cp
    optimizer.zero_grad()
    loss.backward()
    shown = loss.detach()
    if cp > 1:
        for t in [p.grad for p in lm.parameters()] + [shown]:
            dist.all_reduce(t)
    optimizer.step()
    if rank == 0:
        print(f"step {step} loss {shown.item():.7f}", flush=True)
if "--save" in sys.argv:
    torch.save(lm.state_dict(), os.path.join(sys.argv[sys.argv.index("--save") + 1], f"rank{rank}.pt"))
if not ONE:
    dist.destroy_process_group()
