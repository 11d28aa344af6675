"""A conditional random field over sequences that are cut into an early and a late part of unequal length."""

import argparse
import os

import torch
import torch.distributed as dist
from torch import nn

p = argparse.ArgumentParser()
p.add_argument("--one", action="store_true")
p.add_argument("--save")
p = p.parse_args()
TAGS, TIME, CUT = 5, 11, 4
rank = 0
if not p.one:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
begin, end = (0, TIME) if p.one else ((0, CUT), (CUT, TIME))[rank]


class HandedOn(torch.autograd.Function):
    @staticmethod
    def forward(ctx, sums):
        dist.send(sums.detach().contiguous(), 1)
        ctx.like = sums
        return sums.new_zeros(())

    @staticmethod
    def backward(ctx, _):
        g = torch.empty_like(ctx.like)
        dist.recv(g, 1)
        return g


class Received(torch.autograd.Function):
    @staticmethod
    def forward(ctx, anchor):
        sums = torch.empty(6, TAGS)
        dist.recv(sums, 0)
        return sums

    @staticmethod
    def backward(ctx, g):
        dist.send(g.contiguous(), 0)
        return None


class CRF(nn.Module):
    def __init__(self):
        super().__init__()
        self.emit = nn.Sequential(nn.Linear(7, 14), nn.Tanh(), nn.Linear(14, TAGS))
        self.move = nn.Parameter(torch.randn(TAGS, TAGS) * 0.3)

    def forward(self, x, tags):
        scores = self.emit(x)
        rows = torch.arange(len(x))
        gold, sums = 0.0, None
        if begin > 0:
            sums = Received.apply(torch.zeros((), requires_grad=True))
        for t in range(begin, end):
            now = scores[:, t - begin]
            gold = gold + now[rows, tags[:, t]]
            if t > 0:
                gold = gold + self.move[tags[:, t - 1], tags[:, t]]
                now = (sums[:, :, None] + self.move).logsumexp(1) + now
            sums = now
        return (sums.logsumexp(1) if end == TIME else HandedOn.apply(sums)) - gold


torch.manual_seed(46)
crf = CRF()
optimizer = torch.optim.SGD(crf.parameters(), lr=0.3)
for step in range(1, 6):
    g = torch.Generator().manual_seed(step)
    x = torch.randn(6, TIME, 7, generator=g)
    tags = (x[..., :TAGS] + x[..., :TAGS].roll(1, 1)).argmax(-1)
    loss = crf(x[:, begin:end], tags).sum() / (6 * TIME)
    optimizer.zero_grad()
    loss.backward()
    shown = loss.detach()
    if not p.one:
        for q in crf.parameters():
            dist.all_reduce(q.grad)
        dist.all_reduce(shown)
    optimizer.step()
    if rank == 0:
        print(f"step {step} loss {shown.item():.7f}", flush=True)
if p.save:
    torch.save(crf.state_dict(), os.path.join(p.save, f"rank{rank}.pt"))
if not p.one:
    dist.destroy_process_group()
