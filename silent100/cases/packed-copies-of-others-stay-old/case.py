"""ZeRO-1 by hand: each matrix has one owner; layers multiply with a packed (transposed) copy made on demand."""

import argparse
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

cli = argparse.ArgumentParser()
cli.add_argument("--one", action="store_true")
cli.add_argument("--faulty", action="store_true")
cli.add_argument("--save")
args = cli.parse_args()
rank, world = 0, 1
if not args.one:
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()


class PackedMatmul(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, packed):
        ctx.save_for_backward(x, packed)
        return x @ packed

    @staticmethod
    def backward(ctx, grad):
        x, packed = ctx.saved_tensors
        return grad @ packed.T, grad.flatten(0, -2).T @ x.flatten(0, -2), None


class PackedLinear(nn.Module):
    """Keeps a packed copy of its weight until told that the weight has changed."""

    def __init__(self, inputs, outputs):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(outputs, inputs) / inputs**0.5)
        self.copy = None

    def changed(self):
        self.copy = None

    def forward(self, x):
        if self.copy is None:
            self.copy = self.weight.detach().T.contiguous()
        return PackedMatmul.apply(x, self.weight, self.copy)


class Tagger(nn.Module):
    def __init__(self, words=70, dim=36, tags=9):
        super().__init__()
        self.words = nn.Embedding(words, dim)
        self.mix = nn.GRU(dim, dim, batch_first=True)
        self.first, self.second, self.third = PackedLinear(dim, 80), PackedLinear(80, 80), PackedLinear(80, tags)

    def forward(self, ids):
        x = self.mix(self.words(ids))[0]
        return self.third(torch.tanh(self.second(torch.tanh(self.first(x)))))


class Sharded:
    """Every parameter is stepped by its owner alone and sent to the others."""

    def __init__(self, model):
        self.model = model
        self.layers = {m.weight: m for m in model.modules() if isinstance(m, PackedLinear)}
        self.owner = {p: i % world for i, p in enumerate(model.parameters())}
        self.adam = torch.optim.Adam([p for p, r in self.owner.items() if r == rank], lr=4e-3, eps=1e-6)

    def step(self):
        self.adam.step()
        for p, owner in self.owner.items():
            if world > 1:
                dist.broadcast(p.data, owner)
            if p in self.layers and (owner == rank or not args.faulty):
                self.layers[p].changed()


torch.manual_seed(13)
tagger = Tagger()
optimizer = Sharded(tagger)
for step in range(1, 6):
    g = torch.Generator().manual_seed(step)
    ids = torch.randint(0, 70, (12, 10), generator=g)
    ids, tags = ids.chunk(world)[rank], (ids % 9).chunk(world)[rank]
    loss = F.cross_entropy(tagger(ids).flatten(0, 1), tags.flatten())
    tagger.zero_grad()
    loss.backward()
    shown = loss.detach().clone()
    if world > 1:
        for p in tagger.parameters():
            dist.all_reduce(p.grad)
            p.grad /= world
        dist.all_reduce(shown)
    optimizer.step()
    if rank == 0:
        print(f"step {step} loss {shown.item() / world:.7f}", flush=True)
if args.save:
    torch.save(tagger.state_dict(), os.path.join(args.save, f"rank{rank}.pt"))
if world > 1:
    dist.destroy_process_group()
