"""A recurrent network with a learned first state; units are cut over ranks, what is shared belongs to rank 0."""

import argparse
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

opts = argparse.ArgumentParser()
opts.add_argument("--one", action="store_true")
opts.add_argument("--faulty", action="store_true")
opts.add_argument("--save")
opts = opts.parse_args()
rank, world = 0, 1
if not opts.one:
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
UNITS = 18


def cut(t):
    return nn.Parameter(t.chunk(world)[rank].clone())


class Units(torch.autograd.Function):
    """All units from the units of all ranks."""

    @staticmethod
    def forward(ctx, own):
        if world == 1:
            return own.clone()
        got = [torch.empty_like(own) for _ in range(world)]
        dist.all_gather(got, own.contiguous())
        return torch.cat(got, 1)

    @staticmethod
    def backward(ctx, g):
        g = g.contiguous().clone()
        if world > 1:
            dist.all_reduce(g)
        return g.chunk(world, 1)[rank]


class Joined(torch.autograd.Function):
    @staticmethod
    def forward(ctx, t):
        t = t.clone()
        if world > 1:
            dist.all_reduce(t)
        return t

    @staticmethod
    def backward(ctx, g):
        return g


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(15, 10)
        self.start = nn.Parameter(torch.randn(UNITS) * 0.5)
        self.inward, self.around = cut(torch.randn(UNITS, 10) * 0.3), cut(torch.randn(UNITS, UNITS) * 0.2)
        self.outward = cut(torch.randn(UNITS, 15) * 0.3)

    def forward(self, ids):
        x = self.embed(ids)
        whole, scores = self.start.expand(len(ids), -1), []
        for t in range(ids.shape[1]):
            own = torch.tanh(x[:, t] @ self.inward.T + whole @ self.around.T)
            scores.append(own @ self.outward)
            whole = Units.apply(own)
        return Joined.apply(torch.stack(scores, 1))


torch.manual_seed(64)
net = Recurrent()
shared = {"embed.weight": net.embed.weight, "start": net.start}
mine = [p for n, p in net.named_parameters() if n not in shared or rank == 0]
sent = ["embed.weight"] if opts.faulty else list(shared)
optimizer = torch.optim.SGD(mine, lr=0.5)
for step in range(1, 6):
    ids = torch.randint(0, 15, (5, 8), generator=torch.Generator().manual_seed(step)).cumsum(1) % 15
    loss = F.cross_entropy(net(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
    net.zero_grad()
    loss.backward()
    if world > 1:
        for p in shared.values():
            dist.all_reduce(p.grad)
    optimizer.step()
    if world > 1:
        for name in sent:
            dist.broadcast(shared[name].data, 0)
    if rank == 0:
        print(f"step {step} loss {loss.item():.7f}", flush=True)
if opts.save:
    state = {n: p.detach() if n in shared else (p.detach(), 0, rank, world) for n, p in net.named_parameters()}
    torch.save(state, os.path.join(opts.save, f"rank{rank}.pt"))
if world > 1:
    dist.destroy_process_group()
