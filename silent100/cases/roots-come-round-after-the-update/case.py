"""A preconditioner of two sides for each matrix; the inverse roots are worked out by one rank per matrix."""

import argparse
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F


def inverse_root(matrix, power=-0.25, floor=1e-3):
    values, vectors = torch.linalg.eigh(matrix.double())
    return (vectors * values.clamp(min=floor).pow(power) @ vectors.T).float()


class TwoSided:
    """All state lies in dicts by name."""

    def __init__(self, named, lr, rank, world, faulty):
        self.named, self.lr, self.rank, self.world, self.faulty = dict(named), lr, rank, world, faulty
        self.statistics, self.roots = {}, {}
        for name, p in self.named.items():
            if p.dim() == 2:
                self.statistics[name] = [0.01 * torch.eye(n) for n in p.shape]
                self.roots[name] = [torch.eye(n) for n in p.shape]
        self.owner = {name: i % world for i, name in enumerate(self.roots)}

    def refresh(self):
        fresh, work = {}, []
        for name, sides in self.statistics.items():
            if self.owner[name] == self.rank:
                self.roots[name] = [inverse_root(side) for side in sides]
            fresh[name] = [root.clone() for root in self.roots[name]]
            if self.world > 1:
                work += [dist.broadcast(root, self.owner[name], async_op=True) for root in fresh[name]]
        return fresh, work

    def settle(self, fresh, work):
        for handle in work:
            handle.wait()
        self.roots = fresh

    @torch.no_grad()
    def step(self):
        for name, sides in self.statistics.items():
            grad = self.named[name].grad
            sides[0] += grad @ grad.T
            sides[1] += grad.T @ grad
        fresh, work = self.refresh()
        if not self.faulty:
            self.settle(fresh, work)
        for name, p in self.named.items():
            grad = p.grad
            if name in self.roots:
                left, right = self.roots[name]
                grad = left @ grad @ right
            p -= self.lr * grad
        if self.faulty:
            self.settle(fresh, work)


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--one", action="store_true")
    p.add_argument("--faulty", action="store_true")
    p.add_argument("--save")
    args = p.parse_args()
    rank, world = 0, 1
    if not args.one:
        dist.init_process_group("gloo")
        rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(29)
    net = nn.Sequential(nn.Linear(10, 24), nn.ELU(), nn.Linear(24, 24), nn.ELU(), nn.Linear(24, 3))
    optimizer = TwoSided(net.named_parameters(), 0.1, rank, world, args.faulty)
    for step in range(1, 6):
        x = torch.randn(30, 10, generator=torch.Generator().manual_seed(step))
        y = x[:, :3].abs() + x[:, 3:6]
        loss = F.l1_loss(net(x[rank::world]), y[rank::world])
        net.zero_grad()
        loss.backward()
        loss = loss.detach() / world
        if world > 1:
            for q in net.parameters():
                dist.all_reduce(q.grad)
                q.grad /= world
            dist.all_reduce(loss)
        optimizer.step()
        if rank == 0:
            print(f"step {step} loss {loss.item():.7f}", flush=True)
    if args.save:
        torch.save(net.state_dict(), os.path.join(args.save, f"rank{rank}.pt"))
    if world > 1:
        dist.destroy_process_group()


main()
