"""ZeRO-1 with a checkpoint whose pieces are not the ranks'."""

import argparse
import os
import shutil
import tempfile

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters

cli = argparse.ArgumentParser()
cli.add_argument("--one", action="store_true")
cli.add_argument("--save")
args = cli.parse_args()
rank, world = 0, 1
if not args.one:
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
PIECES = 4


class Rms:
    """RMSprop on this rank's half of a vector of odd length."""

    def __init__(self, size):
        self.size, self.cuts = size, [r * size // world for r in range(world + 1)]
        self.v = torch.zeros(self.cuts[rank + 1] - self.cuts[rank])

    def whole(self, part):
        full = torch.zeros(self.size)
        full[self.cuts[rank] : self.cuts[rank + 1]] = part
        if world > 1:
            dist.all_reduce(full)
        return full

    def step(self, w, g):
        own = slice(self.cuts[rank], self.cuts[rank + 1])
        self.v = 0.95 * self.v + 0.05 * g[own].square()
        return self.whole(w[own] - 0.01 * g[own] / (self.v.sqrt() + 1e-2))

    def write(self, folder, w):
        v = self.whole(self.v)
        for i, pieces in enumerate(zip(w.tensor_split(PIECES), v.tensor_split(PIECES))):
            if i % world == rank:
                torch.save([piece.clone() for piece in pieces], f"{folder}/{i}.pt")

    def read(self, folder):
        w, v = (torch.cat(t) for t in zip(*(torch.load(f"{folder}/{i}.pt") for i in range(PIECES))))
        self.v = v[self.cuts[rank] : self.cuts[rank + 1]].clone()
        return w


def build():
    net = nn.Sequential(nn.Linear(8, 25), nn.GELU(), nn.Linear(25, 25), nn.GELU(), nn.Linear(25, 3))
    return net, Rms(sum(p.numel() for p in net.parameters()))


torch.manual_seed(74)
net, rms = build()
for step in range(1, 7):
    if step == 4 and not args.one:
        place = [tempfile.mkdtemp() if rank == 0 else None]
        dist.broadcast_object_list(place)
        rms.write(place[0], parameters_to_vector(net.parameters()).detach())
        dist.barrier()
        net, rms = build()
        vector_to_parameters(rms.read(place[0]), net.parameters())
        dist.barrier()
        if rank == 0:
            shutil.rmtree(place[0])
    g = torch.Generator().manual_seed(step)
    x, y = torch.randn(12, 8, generator=g), torch.randint(0, 3, (12,), generator=g)
    loss = nn.functional.cross_entropy(net(x[rank::world]), y[rank::world]) / world
    net.zero_grad()
    loss.backward()
    grads, loss = parameters_to_vector([p.grad for p in net.parameters()]), loss.detach()
    if world > 1:
        dist.all_reduce(grads)
        dist.all_reduce(loss)
    vector_to_parameters(rms.step(parameters_to_vector(net.parameters()).detach(), grads), net.parameters())
    if rank == 0:
        print(f"step {step} loss {loss.item():.7f}", flush=True)
if args.save:
    torch.save(net.state_dict(), os.path.join(args.save, f"rank{rank}.pt"))
if world > 1:
    dist.destroy_process_group()
