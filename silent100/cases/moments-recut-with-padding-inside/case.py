"""Continues on two ranks what four ranks began: flat moments are joined and cut anew."""

import os
import sys

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

one, faulty = "--one" in sys.argv, "--faulty" in sys.argv
OLD_RANKS, BETA1, BETA2, LR, EPS = 4, 0.9, 0.95, 4e-3, 1e-5


def network():
    torch.manual_seed(101)
    return nn.Sequential(nn.Linear(13, 37), nn.Tanh(), nn.Linear(37, 37), nn.Tanh(), nn.Linear(37, 3))


def old_checkpoint(total):
    """The four files of an earlier run, each padded to a multiple of 64 elements, and its update count."""
    g = torch.Generator().manual_seed(55)
    m, v = torch.randn(total, generator=g) * 0.02, torch.rand(total, generator=g) * 1e-3 + 1e-4
    share = -(-total // OLD_RANKS)
    files = []
    for r in range(OLD_RANKS):
        piece = slice(r * share, min((r + 1) * share, total))
        length = piece.stop - piece.start
        pad = -length % 64
        files.append({"m": F.pad(m[piece], (0, pad)), "v": F.pad(v[piece], (0, pad), value=1e-3), "length": length})
    return files, 10


def joined(files, key, total):
    if faulty:
        return torch.cat([f[key] for f in files])[:total]
    return torch.cat([f[key][: f["length"]] for f in files])


class ShardedAdam:
    def __init__(self, net, rank, world):
        self.parameters = list(net.parameters())
        self.total = sum(p.numel() for p in self.parameters)
        self.share = -(-self.total // world)
        self.rank, self.world = rank, world
        files, self.t = old_checkpoint(self.total)
        pad = self.share * world - self.total
        self.m, self.v = (F.pad(joined(files, key, self.total), (0, pad)).chunk(world)[rank].clone() for key in "mv")
        self.pad = pad

    @torch.no_grad()
    def step(self):
        flat = F.pad(torch.cat([p.grad.flatten() for p in self.parameters]), (0, self.pad))
        weights = F.pad(torch.cat([p.flatten() for p in self.parameters]), (0, self.pad)).chunk(self.world)[self.rank]
        if self.world > 1:
            dist.all_reduce(flat)
        g = flat.chunk(self.world)[self.rank] / self.world
        self.t += 1
        self.m.mul_(BETA1).add_(g, alpha=1 - BETA1)
        self.v.mul_(BETA2).addcmul_(g, g, value=1 - BETA2)
        update = self.m / (1 - BETA1**self.t) / ((self.v / (1 - BETA2**self.t)).sqrt() + EPS)
        new = weights - LR * update
        if self.world > 1:
            parts = [torch.empty_like(new) for _ in range(self.world)]
            dist.all_gather(parts, new.contiguous())
            new = torch.cat(parts)
        for p, piece in zip(self.parameters, new[: self.total].split([p.numel() for p in self.parameters])):
            p.copy_(piece.view_as(p))
            p.grad = None


if not one:
    dist.init_process_group("gloo")
rank, world = (0, 1) if one else (dist.get_rank(), dist.get_world_size())
net = network()
optimizer = ShardedAdam(net, rank, world)
for step in range(1, 5):
    x = torch.randn(16, 13, generator=torch.Generator().manual_seed(step))
    mine = x[rank::world]
    loss = F.mse_loss(net(mine), mine[:, :3].sin())
    loss.backward()
    optimizer.step()
    loss = loss.detach()
    if not one:
        dist.all_reduce(loss)
    if rank == 0:
        print(f"step {step} loss {loss.item() / world:.7f}", flush=True)
if "--save" in sys.argv:
    torch.save(net.state_dict(), os.path.join(sys.argv[sys.argv.index("--save") + 1], f"rank{rank}.pt"))
if not one:
    dist.destroy_process_group()
