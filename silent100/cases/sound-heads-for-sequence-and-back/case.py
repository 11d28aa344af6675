import argparse
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

cli = argparse.ArgumentParser()
cli.add_argument("--one", action="store_true")
cli.add_argument("--save")
args = cli.parse_args()
rank, sp = 0, 1
if not args.one:
    dist.init_process_group("gloo")
    rank, sp = dist.get_rank(), dist.get_world_size()
HEADS, SIZE, LENGTH = 6, 5, 14
D = HEADS * SIZE


def exchange(x, cut, join):
    """Cuts a tensor along one dimension, and joins what others send along another."""
    pieces = [piece.contiguous() for piece in x.chunk(sp, cut)]
    got = [torch.empty_like(pieces[0]) for _ in range(sp)]
    dist.all_to_all(got, pieces)
    return torch.cat(got, join)


class Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, cut, join):
        ctx.way = cut, join
        return exchange(x, cut, join)

    @staticmethod
    def backward(ctx, g):
        cut, join = ctx.way
        return exchange(g, join, cut), None, None


class Relative(nn.Module):
    """Attention with a learned bias for each head and distance."""

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(D)
        self.q, self.k, self.v, self.o = (nn.Linear(D, D, bias=False) for _ in range(4))
        self.far = nn.Parameter(torch.zeros(HEADS, LENGTH))

    def forward(self, x):
        h = self.norm(x)
        heads = [w(h).unflatten(-1, (HEADS, SIZE)) for w in (self.q, self.k, self.v)]
        if sp > 1:
            heads = [Exchange.apply(t, 2, 1) for t in heads]
        q, k, v = (t.transpose(1, 2) for t in heads)
        distance = torch.arange(LENGTH)[:, None] - torch.arange(LENGTH)
        own = self.far.chunk(sp)[rank]
        bias = own[:, distance.clamp(min=0)].masked_fill(distance < 0, float("-inf"))
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=bias).transpose(1, 2)
        if sp > 1:
            y = Exchange.apply(y, 1, 2)
        return x + self.o(y.flatten(2))


torch.manual_seed(77)
net = nn.Sequential(nn.Embedding(41, D), Relative(), Relative(), nn.Linear(D, 41))
optimizer = torch.optim.SGD(net.parameters(), lr=0.4)
for step in range(1, 5):
    rows = torch.randint(0, 41, (5, LENGTH + 1), generator=torch.Generator().manual_seed(step))
    x, y = rows[:, :-1].chunk(sp, 1)[rank], rows[:, 1:].chunk(sp, 1)[rank]
    loss = F.cross_entropy(net(x).flatten(0, 1), y.flatten()) / sp
    optimizer.zero_grad()
    loss.backward()
    loss = loss.detach()
    if sp > 1:
        for t in [p.grad for p in net.parameters()] + [loss]:
            dist.all_reduce(t)
    optimizer.step()
    if rank == 0:
        print(f"step {step} loss {loss.item():.7f}", flush=True)
if args.save:
    torch.save(net.state_dict(), os.path.join(args.save, f"rank{rank}.pt"))
if sp > 1:
    dist.destroy_process_group()
