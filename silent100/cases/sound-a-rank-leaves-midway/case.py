"""Elastic toy: ranks 0-2 train two steps with a sharded Adagrad, then rank 2 leaves and 0-1 carry on."""

import argparse
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

V, D, SEQ, BATCH = 36, 32, 8, 12


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(D)
        self.lin = nn.Bilinear(D, 4, D, bias=False)
        self.small = nn.Linear(D, 4)

    def forward(self, x):
        h = self.norm(x).cumsum(1) / torch.arange(1, x.shape[1] + 1)[:, None]
        return x + self.lin(h, self.small(x))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(V, D, max_norm=None)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.norm = nn.LayerNorm(D)
        self.head = nn.Linear(D, V)

    def forward(self, x):
        x = self.embed(x)
        for b in self.blocks:
            x = b(x)
        return self.head(self.norm(x))


class ShardedAdagrad:
    """The accumulator of flat element i lives on member i // ceil(n / members) of the group."""

    def __init__(self, params, lr=0.03):
        self.params, self.lr = list(params), lr
        self.n = sum(p.numel() for p in self.params)

    def join(self, group, index, size, full=None):
        self.group, self.index, self.size = group, index, size
        self.chunk = -(-self.n // size)
        full = torch.full((self.n,), 0.01) if full is None else full
        self.acc = F.pad(full, (0, self.chunk * size - self.n)).view(size, -1)[index].clone()

    def gather(self, piece):
        if self.size == 1:
            return piece[: self.n]
        out = [torch.empty_like(piece) for _ in range(self.size)]
        dist.all_gather(out, piece.contiguous(), group=self.group)
        return torch.cat(out)[: self.n]

    @torch.no_grad()
    def step(self):
        flat = torch.cat([p.grad.flatten() for p in self.params])
        if self.size > 1:
            dist.all_reduce(flat, group=self.group)
        g = F.pad(flat, (0, self.chunk * self.size - self.n)).view(self.size, -1)[self.index]
        self.acc += g * g
        delta = self.gather(g / (self.acc.sqrt() + 1e-8))
        for p, d in zip(self.params, delta.split([p.numel() for p in self.params])):
            p.sub_(d.view_as(p), alpha=self.lr)
            p.grad = None


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--one", action="store_true")
    ap.add_argument("--save")
    args = ap.parse_args()
    rank, world = 0, 1
    if not args.one:
        dist.init_process_group("gloo")
        rank, world = dist.get_rank(), dist.get_world_size()
        smaller = dist.new_group([0, 1])
    torch.manual_seed(6)
    net = Net()
    opt = ShardedAdagrad(net.parameters())
    opt.join(None, rank, world)
    for step in range(1, 5):
        if step == 3 and world == 3:
            full = opt.gather(opt.acc)  # last collective of the old world
            if rank < 2:
                opt.join(smaller, rank, 2, full)
            world = 2
        if not args.one and rank >= world:
            continue
        ids = torch.randint(V, (BATCH, SEQ + 1), generator=torch.Generator().manual_seed(step)).chunk(world)[rank]
        loss = F.cross_entropy(net(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten()) / world
        loss.backward()
        shown = loss.detach()
        if world > 1:
            dist.all_reduce(shown, group=opt.group)
        opt.step()
        if rank == 0:
            print(f"step {step} loss {shown.item():.7f}", flush=True)
    if not args.one:  # the one that left gets the final weights for its files
        for p in net.parameters():
            dist.broadcast(p.data, 0)
    if args.save:
        torch.save(
            {k: p.detach().clone() for k, p in net.named_parameters()}, os.path.join(args.save, f"rank{rank}.pt")
        )
    if not args.one:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
