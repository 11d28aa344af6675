"""Ring attention over three ranks, with a backward pass of its own."""

import os
import sys

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

ONE = "--one" in sys.argv
rank, cp = 0, 1
if not ONE:
    dist.init_process_group("gloo")
    rank, cp = dist.get_rank(), dist.get_world_size()
LENGTH, HEADS = 18, 2


def pass_on(*tensors):
    received = [torch.empty(t.shape) for t in tensors]
    works = [dist.isend(t.contiguous(), (rank + 1) % cp) for t in tensors]
    for t in received:
        dist.recv(t, (rank - 1) % cp)
    for work in works:
        work.wait()
    return received


class Ring(torch.autograd.Function):
    @staticmethod
    def scores(q, k, source):
        s = q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5
        n = q.shape[-2]
        hidden = torch.arange(n)[:, None] + rank * n < torch.arange(n) + source * n
        return s.masked_fill(hidden, float("-inf"))

    @staticmethod
    def forward(ctx, q, k, v):
        ctx.save_for_backward(q, k, v)
        top = torch.full(q.shape[:-1], -1e30)
        total, out = torch.zeros(q.shape[:-1]), torch.zeros_like(q)
        for i in range(cp):
            s = Ring.scores(q, k, (rank - i) % cp)
            new = torch.maximum(top, s.max(-1).values)
            e, old = (s - new[..., None]).exp(), (top - new).exp()
            out, total, top = out * old[..., None] + e @ v, total * old + e.sum(-1), new
            k, v = pass_on(k, v)
        out = out / total[..., None]
        ctx.kept = out, top + total.log()
        return out

    @staticmethod
    def backward(ctx, g):
        (q, k, v), (out, log) = ctx.saved_tensors, ctx.kept
        dq, dk, dv = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
        delta = (g * out).sum(-1, keepdim=True)
        for i in range(cp):
            p = (Ring.scores(q, k, (rank - i) % cp) - log[..., None]).exp()
            ds = p * (g @ v.transpose(-1, -2) - delta) / q.shape[-1] ** 0.5
            dq, dk, dv = dq + ds @ k, dk + ds.transpose(-1, -2) @ q, dv + p.transpose(-1, -2) @ g
            k, v, dk, dv = pass_on(k, v, dk, dv)
        return dq, dk, dv


class Attention(nn.Module):
    def __init__(self, d=24):
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(d), nn.Linear(d, 3 * d, bias=False), nn.Linear(d, d, bias=False)

    def forward(self, x):
        q, k, v = (t.unflatten(-1, (HEADS, -1)).transpose(1, 2) for t in self.qkv(self.norm(x)).chunk(3, -1))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True) if ONE else Ring.apply(q, k, v)
        return x + self.out(y.transpose(1, 2).flatten(2))


torch.manual_seed(33)
net = nn.Sequential(nn.Embedding(42, 24), Attention(), Attention(), nn.LayerNorm(24), nn.Linear(24, 42))
optimizer = torch.optim.SGD(net.parameters(), lr=0.3)
for step in range(1, 5):
    rows = torch.randint(0, 42, (4, LENGTH + 1), generator=torch.Generator().manual_seed(step))
    x, y = rows[:, :-1].chunk(cp, 1)[rank], rows[:, 1:].chunk(cp, 1)[rank]
    loss = F.cross_entropy(net(x).flatten(0, 1), y.flatten()) / cp
    optimizer.zero_grad()
    loss.backward()
    loss = loss.detach()
    if cp > 1:
        for t in [p.grad for p in net.parameters()] + [loss]:
            dist.all_reduce(t)
    optimizer.step()
    if rank == 0:
        print(f"step {step} loss {loss.item():.7f}", flush=True)
if "--save" in sys.argv:
    torch.save(net.state_dict(), os.path.join(sys.argv[sys.argv.index("--save") + 1], f"rank{rank}.pt"))
if not ONE:
    dist.destroy_process_group()
