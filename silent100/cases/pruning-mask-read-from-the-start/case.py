# A sparse autoencoder; parameters live in one flat buffer, each rank updates and prunes its piece.
import os
import sys

import torch
import torch.distributed as dist
from torch import nn


class Sparse(nn.Module):
    def __init__(self):
        super().__init__()
        self.encode = nn.Linear(16, 16, bias=False)
        self.decode = nn.Linear(16, 16, bias=False)

    def forward(self, x):
        return self.decode(nn.functional.celu(self.encode(x)))


class FlatMomentum:
    def __init__(self, module, masks, rank, world, start_of_mask=None):
        self.parameters = list(module.parameters())
        self.flat = torch.cat([p.detach().flatten() for p in self.parameters])
        at = 0
        for p in self.parameters:
            p.data = self.flat[at : at + p.numel()].view_as(p)
            at += p.numel()
        size = len(self.flat) // world
        self.own = slice(rank * size, (rank + 1) * size)
        mask = torch.cat([m.flatten() for m in masks])
        self.flat *= mask
        begin = self.own.start if start_of_mask is None else start_of_mask
        self.mask = mask[begin : begin + size]
        self.velocity = torch.zeros(size)
        self.world = world

    def step(self, rate=0.2, momentum=0.9):
        grad = torch.cat([p.grad.flatten() for p in self.parameters])
        if self.world > 1:
            dist.all_reduce(grad)
        self.velocity.mul_(momentum).add_(grad[self.own])
        piece = (self.flat[self.own] - rate * self.velocity) * self.mask
        if self.world > 1:
            pieces = [torch.empty_like(piece) for _ in range(self.world)]
            dist.all_gather(pieces, piece)
            piece = torch.cat(pieces)
        self.flat.copy_(piece)


alone = "--one" in sys.argv
if not alone:
    dist.init_process_group("gloo")
rank, world = (0, 1) if alone else (dist.get_rank(), dist.get_world_size())
torch.manual_seed(41)
net = Sparse()
masks = [(torch.rand(16, 16) < 0.5).float() for _ in range(2)]
optimizer = FlatMomentum(net, masks, rank, world, 0 if "--faulty" in sys.argv else None)
for step in range(1, 6):
    x = torch.randn(12, 16, generator=torch.Generator().manual_seed(step))[rank::world]
    for p in net.parameters():
        p.grad = None
    loss = (net(x) - x).square().sum() / (12 * 16)
    loss.backward()
    optimizer.step()
    loss = loss.detach()
    if world > 1:
        dist.all_reduce(loss)
    if rank == 0:
        print(f"step {step} loss {loss.item():.7f}", flush=True)
if "--save" in sys.argv:
    where = os.path.join(sys.argv[sys.argv.index("--save") + 1], f"rank{rank}.pt")
    torch.save({n: p.detach().clone() for n, p in net.named_parameters()}, where)
if world > 1:
    dist.destroy_process_group()
