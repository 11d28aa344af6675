"""A recommender whose hashed tables are cut by rows over the processes."""

import argparse
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

PRIME = 2_147_483_647


class Together(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        x = x.clone()
        if dist.is_initialized():
            dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx, grad):
        return grad


class HashedTable(nn.Module):
    def __init__(self, rows, width, salt, rank, world, faulty):
        super().__init__()
        self.rows, self.salt, self.first = rows, salt, rank * (rows // world)
        part = (torch.randn(rows, width) / 4).chunk(world)[rank]
        self.table = nn.Parameter(part.clone())
        self.modulus = len(self.table) if faulty else rows

    def forward(self, names):
        at = (names * self.salt + 12345) % PRIME % self.modulus - self.first
        here = (at >= 0) & (at < len(self.table))
        found = self.table[at.clamp(0, len(self.table) - 1)] * here[..., None]
        return Together.apply(found)


class Recommender(nn.Module):
    def __init__(self, rank, world, faulty):
        super().__init__()
        rest = rank, world, faulty
        self.people, self.things = HashedTable(80, 12, 7919, *rest), HashedTable(120, 12, 104729, *rest)
        self.deep = nn.Sequential(nn.Linear(36, 32), nn.ReLU(), nn.Linear(32, 1))

    def forward(self, person, thing):
        p, t = self.people(person), self.things(thing)
        return self.deep(torch.cat([p, t, p * t], 1)).squeeze(1)


def clicks(step):
    g = torch.Generator().manual_seed(step)
    person, thing = torch.randint(0, 10**6, (2, 64), generator=g)
    return person, thing, ((person + thing) % 3 == 0).float()


def main():
    cli = argparse.ArgumentParser()
    cli.add_argument("--one", action="store_true")
    cli.add_argument("--faulty", action="store_true")
    cli.add_argument("--save", type=Path)
    args = cli.parse_args()
    rank, world = 0, 1
    if not args.one:
        dist.init_process_group("gloo")
        rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(31)
    net = Recommender(rank, world, args.faulty)
    sums = {name: torch.full_like(p, 0.1) for name, p in net.named_parameters()}
    for step in range(1, 6):
        person, thing, clicked = clicks(step)
        loss = F.binary_cross_entropy_with_logits(net(person, thing), clicked)
        grads = torch.autograd.grad(loss, list(net.parameters()))
        with torch.no_grad():
            for (name, p), grad in zip(net.named_parameters(), grads):
                sums[name] += grad * grad
                p -= 0.1 * grad / sums[name].sqrt()
        if rank == 0:
            print(f"step {step} loss {loss.item():.7f}", flush=True)
    if args.save:
        state = {n: (p, 0, rank, world) if n.endswith("table") else p for n, p in net.state_dict().items()}
        torch.save(state, args.save / f"rank{rank}.pt")
    if world > 1:
        dist.destroy_process_group()


main()
