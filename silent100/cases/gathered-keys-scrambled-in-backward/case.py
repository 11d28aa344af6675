"""Context parallelism with torch's own differentiable all-gather for keys and values."""

import argparse
import os

import torch
import torch.distributed as dist
import torch.distributed.nn.functional as dnn
import torch.nn as nn
import torch.nn.functional as F

cli = argparse.ArgumentParser()
cli.add_argument("--one", action="store_true")
cli.add_argument("--faulty", action="store_true")
cli.add_argument("--save")
args = cli.parse_args()
rank, cp = 0, 1
if not args.one:
    dist.init_process_group("gloo")
    rank, cp = dist.get_rank(), dist.get_world_size()


class Dense(torch.autograd.Function):
    """Identity whose gradient is laid out densely."""

    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        return grad.contiguous()


def gather(x):
    """(rows, heads, length/cp, head) to (rows, heads, length, head)."""
    if cp == 1:
        return x
    parts = dnn.all_gather(x.contiguous())
    if not args.faulty:
        parts = [Dense.apply(part) for part in parts]
    return torch.cat(parts, 2)


class Attention(nn.Module):
    def __init__(self, dim=32, heads=4):
        super().__init__()
        self.heads = heads
        self.q_proj, self.k_proj = nn.Linear(dim, dim, bias=False), nn.Linear(dim, dim, bias=False)
        self.v_proj, self.o_proj = nn.Linear(dim, dim, bias=False), nn.Linear(dim, dim, bias=False)

    def forward(self, x):
        q, k, v = (
            p(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for p in (self.q_proj, self.k_proj, self.v_proj)
        )
        k, v = gather(k), gather(v)
        t = q.shape[2]
        mask = (torch.arange(t) + rank * t)[:, None] >= torch.arange(k.shape[2])
        return self.o_proj(F.scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(1, 2).flatten(2))


class Lm(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(42, 32), nn.Linear(32, 42)
        self.norm = nn.ModuleList(nn.LayerNorm(32) for _ in range(2))
        self.attn = nn.ModuleList(Attention() for _ in range(2))

    def forward(self, ids):
        x = self.embed(ids)
        for norm, attn in zip(self.norm, self.attn):
            x = x + attn(norm(x))
        return self.head(x)


torch.manual_seed(53)
lm = Lm()
optimizer = torch.optim.SGD(lm.parameters(), lr=0.2, momentum=0.9)
for step in range(1, 5):
    rows = torch.randint(0, 42, (4, 17), generator=torch.Generator().manual_seed(step))
    ids, labels = rows[:, :-1].chunk(cp, 1)[rank], rows[:, 1:].chunk(cp, 1)[rank]
    loss = F.cross_entropy(lm(ids).flatten(0, 1), labels.flatten()) / cp
    optimizer.zero_grad()
    loss.backward()
    loss = loss.detach()
    if cp > 1:
        for p in lm.parameters():
            dist.all_reduce(p.grad)
        dist.all_reduce(loss)
    optimizer.step()
    if rank == 0:
        print(f"step {step} loss {loss.item():.7f}", flush=True)
if args.save:
    torch.save(lm.state_dict(), os.path.join(args.save, f"rank{rank}.pt"))
if not args.one:
    dist.destroy_process_group()
