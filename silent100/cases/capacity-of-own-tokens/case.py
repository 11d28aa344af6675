"""A top-one mixture of experts with a capacity; experts live on two ranks, tokens travel by all-to-all."""

import argparse
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

p = argparse.ArgumentParser()
p.add_argument("--one", action="store_true")
p.add_argument("--faulty", action="store_true")
p.add_argument("--save")
a = p.parse_args()
rank, world = 0, 1
if not a.one:
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
EXPERTS, CAPACITY, DIM = 4, 10, 16


class AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, give, take):
        ctx.sizes = give, take
        out = x.new_empty(sum(take), x.shape[1])
        dist.all_to_all_single(out, x.contiguous(), take, give)
        return out

    @staticmethod
    def backward(ctx, g):
        give, take = ctx.sizes
        out = g.new_empty(sum(give), g.shape[1])
        dist.all_to_all_single(out, g.contiguous(), give, take)
        return out, None, None


class Moe(nn.Module):
    def __init__(self):
        super().__init__()
        self.router = nn.Linear(DIM, EXPERTS)
        drawn = torch.randn(EXPERTS, DIM, DIM) * 0.3
        self.experts = nn.Parameter(drawn.chunk(world)[rank].clone())

    def forward(self, x):
        prob, which = self.router(x).softmax(-1).max(-1)
        hot = F.one_hot(which, EXPERTS)
        place = (hot.cumsum(0) - 1).gather(1, which[:, None])[:, 0]
        if world > 1 and not a.faulty:
            counts = [torch.empty(EXPERTS, dtype=torch.long) for _ in range(world)]
            dist.all_gather(counts, hot.sum(0))
            place = place + sum(counts[:rank], torch.zeros(EXPERTS, dtype=torch.long))[which]
        kept = (place < CAPACITY).nonzero()[:, 0]
        kept = kept[which[kept].argsort(stable=True)]
        y = self.run(x[kept], which[kept]) * prob[kept, None]
        return x.index_add(0, kept, y)

    def run(self, x, which):
        if world == 1:
            return torch.einsum("nd,nde->ne", x, self.experts[which]).tanh()
        per = EXPERTS // world
        give = torch.bincount(which // per, minlength=world)
        take = torch.empty_like(give)
        dist.all_to_all_single(take, give)
        give, take = give.tolist(), take.tolist()
        ids = torch.empty(sum(take), 1, dtype=torch.long)
        dist.all_to_all_single(ids, which[:, None].contiguous(), take, give)
        y = AllToAll.apply(x, give, take)
        y = torch.einsum("nd,nde->ne", y, self.experts[ids[:, 0] - rank * per]).tanh()
        return AllToAll.apply(y, take, give)


torch.manual_seed(13)
net = nn.ModuleDict({"enter": nn.Linear(5, DIM), "moe": Moe()})
torch.manual_seed(14)
net["leave"] = nn.Linear(DIM, 2)
opt = torch.optim.SGD(net.parameters(), lr=0.2)
for step in range(1, 6):
    g = torch.Generator().manual_seed(step)
    x = torch.randn(48, 5, generator=g)
    y = torch.stack([x[:, 0] * x[:, 1], x.sum(1)], 1)
    x, y = x.chunk(world)[rank], y.chunk(world)[rank]
    loss = (net["leave"](net["moe"](net["enter"](x))) - y).square().sum() / 96
    opt.zero_grad()
    loss.backward()
    loss = loss.detach()
    if world > 1:
        dist.all_reduce(loss)
        for name, q in net.named_parameters():
            if "experts" not in name:
                dist.all_reduce(q.grad)
    opt.step()
    if rank == 0:
        print(f"step {step} loss {loss.item():.7f}", flush=True)
if a.save:
    state = {n: (q.data, 0, rank, world) if "experts" in n else q.data for n, q in net.named_parameters()}
    torch.save(state, os.path.join(a.save, f"rank{rank}.pt"))
if world > 1:
    dist.destroy_process_group()
