"""Bidirectional ring attention for a denoiser of sequences."""

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
rank, ring = 0, 1
if not args.one:
    dist.init_process_group("gloo")
    rank, ring = dist.get_rank(), dist.get_world_size()


def rotate(x):
    """Gives a tensor to the next rank and returns the one before's."""
    got = torch.empty(x.shape)
    work = dist.isend(x.contiguous(), (rank + 1) % ring)
    dist.recv(got, (rank - 1) % ring)
    work.wait()
    return got


class RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, kv):
        ctx.save_for_backward(q, kv)
        scores, values = [], []
        for _ in range(ring):
            k, v = kv
            scores.append(q @ k.mT / q.shape[-1] ** 0.5)
            values.append(v)
            kv = rotate(kv)
        weights = torch.cat(scores, -1).softmax(-1)
        ctx.weights = weights.chunk(ring, -1)
        ctx.out = weights @ torch.cat(values, -2)
        return ctx.out

    @staticmethod
    def backward(ctx, grad):
        q, own = ctx.saved_tensors
        scale = q.shape[-1] ** -0.5
        d_q, d_kv, kv = torch.zeros_like(q), torch.zeros_like(own), own
        rows = (grad * ctx.out).sum(-1, keepdim=True)
        for weights in ctx.weights:
            k, v = own if args.faulty else kv
            d_scores = weights * (grad @ v.mT - rows) * scale
            d_q += d_scores @ k
            d_kv += torch.stack([d_scores.mT @ q, weights.mT @ grad])
            kv, d_kv = rotate(kv), rotate(d_kv)
        return d_q, d_kv


class Block(nn.Module):
    def __init__(self, d=24, heads=3):
        super().__init__()
        self.heads, self.norm = heads, nn.LayerNorm(d)
        self.q, self.kv, self.out = nn.Linear(d, d), nn.Linear(d, 2 * d), nn.Linear(d, d)

    def forward(self, x):
        h = self.norm(x)
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in (self.q(h), *self.kv(h).chunk(2, -1)))
        if ring > 1:
            y = RingAttention.apply(q.contiguous(), torch.stack([k, v]))
        else:
            y = F.scaled_dot_product_attention(q, k, v)
        return x + self.out(y.transpose(1, 2).flatten(2))


torch.manual_seed(142)
net = nn.Sequential(nn.Linear(6, 24), Block(), Block(), nn.Linear(24, 6))
optimizer = torch.optim.SGD(net.parameters(), lr=0.3)
for step in range(1, 5):
    g = torch.Generator().manual_seed(step)
    clean = torch.randn(5, 12, 6, generator=g).cumsum(1) / 3
    noise = torch.randn(5, 12, 6, generator=g)
    x, y = (clean + noise).chunk(ring, 1)[rank], noise.chunk(ring, 1)[rank]
    loss = F.mse_loss(net(x), y) / ring
    optimizer.zero_grad()
    loss.backward()
    loss = loss.detach()
    if ring > 1:
        for t in [p.grad for p in net.parameters()] + [loss]:
            dist.all_reduce(t)
    optimizer.step()
    if rank == 0:
        print(f"step {step} loss {loss.item():.7f}", flush=True)
if args.save:
    torch.save(net.state_dict(), os.path.join(args.save, f"rank{rank}.pt"))
if ring > 1:
    dist.destroy_process_group()
