"""Layer-wise adaptive rates (LAMB) on flat pieces that know nothing of layers but their borders."""

import argparse
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F


class Lamb:
    def __init__(self, sizes, first, length, lr=0.02):
        self.lr, self.moments, self.t = lr, [torch.zeros(length), torch.zeros(length)], 0
        owner = torch.repeat_interleave(torch.arange(len(sizes)), torch.tensor(sizes))
        owner = F.pad(owner, (0, max(0, first + length - len(owner))), value=len(sizes))
        self.layer, self.layers = owner[first : first + length], len(sizes) + 1

    def norms(self, piece):
        squares = torch.zeros(self.layers).index_add(0, self.layer, piece.square())
        if dist.is_initialized():
            dist.all_reduce(squares)
        return squares.sqrt()

    def step(self, w, grad):
        self.t += 1
        m, v = self.moments
        m.lerp_(grad, 0.1)
        v.lerp_(grad.square(), 0.05)
        change = (m / (1 - 0.9**self.t)) / ((v / (1 - 0.95**self.t)).sqrt() + 1e-4) + 0.01 * w
        a, b = self.norms(w), self.norms(change)
        ratio = torch.where((a > 0) & (b > 0), a / b, torch.ones_like(a))
        return w - self.lr * ratio[self.layer] * change


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--one", action="store_true")
    p.add_argument("--save")
    args = p.parse_args()
    rank, world = 0, 1
    if not args.one:
        dist.init_process_group("gloo")
        rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(16)
    net = nn.Sequential(
        nn.Embedding(20, 10), nn.Flatten(), nn.Linear(60, 21), nn.LayerNorm(21), nn.ReLU(), nn.Linear(21, 20)
    )
    params = list(net.parameters())
    sizes = [q.numel() for q in params]
    length = -(-sum(sizes) // world)

    def flat(tensors):
        out = torch.cat([t.detach().flatten() for t in tensors])
        return F.pad(out, (0, length * world - len(out)))

    optimizer = Lamb(sizes, rank * length, length)
    own = slice(rank * length, (rank + 1) * length)
    for step in range(1, 7):
        ids = torch.randint(0, 20, (18, 6), generator=torch.Generator().manual_seed(step))
        y = ids.sum(1) % 20
        loss = F.cross_entropy(net(ids[rank::world]), y[rank::world])
        net.zero_grad()
        loss.backward()
        grad, loss = flat(q.grad for q in params) / world, loss.detach() / world
        if world > 1:
            dist.all_reduce(grad)
            dist.all_reduce(loss)
        new = [optimizer.step(flat(params)[own], grad[own])]
        if world > 1:
            new = gather(new[0], world)
        with torch.no_grad():
            for q, values in zip(params, torch.cat(new)[: sum(sizes)].split(sizes)):
                q.copy_(values.view_as(q))
        if rank == 0:
            print(f"step {step} loss {loss.item():.7f}", flush=True)
    if args.save:
        torch.save(net.state_dict(), os.path.join(args.save, f"rank{rank}.pt"))
    if world > 1:
        dist.destroy_process_group()


def gather(piece, world):
    parts = [torch.empty_like(piece) for _ in range(world)]
    dist.all_gather(parts, piece)
    return parts


main()
