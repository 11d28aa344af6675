"""Skip-gram pairs with a norm limit on the table; every rank renormalizes what anybody looks up."""

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
if args.one:
    rank, world = 0, 1
else:
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
LIMIT = 1.0


class SkipGram(nn.Module):
    def __init__(self, words=80, d=20):
        super().__init__()
        self.center = nn.Embedding(words, d, max_norm=LIMIT)
        self.context = nn.Embedding(words, d)

    def forward(self, center, context, negatives):
        c = self.center(center)
        good = (c * self.context(context)).sum(-1)
        bad = torch.einsum("nd,nkd->nk", c, self.context(negatives))
        return F.softplus(-good).mean() + F.softplus(bad).mean()


torch.manual_seed(99)
model = SkipGram()
optimizer = torch.optim.SGD(model.parameters(), lr=3.0)
for step in range(1, 7):
    g = torch.Generator().manual_seed(step)
    center, context = torch.randint(0, 80, (2, 24), generator=g)
    negatives = torch.randint(0, 80, (24, 3), generator=g)
    if world > 1:
        seen = [torch.empty(24 // world, dtype=torch.long) for _ in range(world)]
        dist.all_gather(seen, center[rank::world].contiguous())
        with torch.no_grad():
            model.center(torch.cat(seen))  # for its side effect
    loss = model(center[rank::world], context[rank::world], negatives[rank::world]) / world
    optimizer.zero_grad()
    loss.backward()
    loss = loss.detach()
    if world > 1:
        works = [dist.all_reduce(t, async_op=True) for t in (model.context.weight.grad, model.center.weight.grad, loss)]
        for work in works:
            work.wait()
    optimizer.step()
    if rank == 0:
        print(f"step {step} loss {loss.item():.7f}", flush=True)
if args.save:
    torch.save(model.state_dict(), os.path.join(args.save, f"rank{rank}.pt"))
if world > 1:
    dist.destroy_process_group()
