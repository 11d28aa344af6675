"""Recursive halving and doubling over point-to-point messages in place of an all-reduce."""

import os
import sys

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

ONE = "--one" in sys.argv
if not ONE:
    dist.init_process_group("gloo")
rank, world = (0, 1) if ONE else (dist.get_rank(), dist.get_world_size())


def trade(give, like, partner):
    take = torch.empty_like(like)
    works = [dist.isend(give.contiguous(), partner), dist.irecv(take, partner)]
    for work in works:
        work.wait()
    return take


def add_by_halving(vector):
    pad = -len(vector) % world
    work = F.pad(vector, (0, pad))
    low, high, distance, trail = 0, len(work), world // 2, []
    while distance:
        middle, partner = (low + high) // 2, rank ^ distance
        keep, give = ((low, middle), (middle, high)) if not rank & distance else ((middle, high), (low, middle))
        work[keep[0] : keep[1]] += trade(work[give[0] : give[1]], work[keep[0] : keep[1]], partner)
        trail.append((partner, keep, give))
        low, high = keep
        distance //= 2
    for partner, keep, give in reversed(trail):
        work[give[0] : give[1]] = trade(work[keep[0] : keep[1]], work[give[0] : give[1]], partner)
    return work[: len(vector)]


class Capsules(nn.Module):
    """Votes are routed twice by agreement."""

    def __init__(self):
        super().__init__()
        self.votes = nn.Parameter(torch.randn(6, 3, 5, 4) * 0.4)
        self.see = nn.Linear(10, 30)

    @staticmethod
    def squash(s):
        n = s.square().sum(-1, keepdim=True)
        return n / (1 + n) * s / (n + 1e-6).sqrt()

    def forward(self, x):
        u = self.squash(self.see(x).view(-1, 6, 5))
        votes = torch.einsum("bid,ijdk->bijk", u, self.votes)
        b = torch.zeros(votes.shape[:3])
        for _ in range(3):
            v = self.squash((b.softmax(2)[..., None] * votes).sum(1))
            b = b + (votes * v[:, None]).sum(-1)
        return v.norm(dim=-1)


torch.manual_seed(101)
net = Capsules()
optimizer = torch.optim.SGD(net.parameters(), lr=0.5, momentum=0.9, nesterov=True)
for step in range(1, 7):
    g = torch.Generator().manual_seed(step)
    x, y = torch.randn(12, 10, generator=g), F.one_hot(torch.randint(0, 3, (12,), generator=g), 3)
    length, hot = net(x[rank::world]), y[rank::world]
    loss = (hot * F.relu(0.9 - length) ** 2 + 0.5 * (1 - hot) * F.relu(length - 0.1) ** 2).sum() / 12
    optimizer.zero_grad()
    loss.backward()
    flat = torch.cat([p.grad.flatten() for p in net.parameters()] + [loss.detach()[None]])
    flat = flat if ONE else add_by_halving(flat)
    for p, part in zip(net.parameters(), flat[:-1].split([p.numel() for p in net.parameters()])):
        p.grad.copy_(part.view_as(p))
    optimizer.step()
    if rank == 0:
        print(f"step {step} loss {flat[-1].item():.7f}", flush=True)
if "--save" in sys.argv:
    torch.save(net.state_dict(), os.path.join(sys.argv[sys.argv.index("--save") + 1], f"rank{rank}.pt"))
if not ONE:
    dist.destroy_process_group()
