"""Sequence parts come together on rank 0, which alone has norm and head; the loss is there, and gradients go back."""

import os
import sys

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

ONE = "--one" in sys.argv
LENGTH, DIM, WORDS = 18, 22, 33
rank, world = 0, 1
if not ONE:
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
OWN = torch.arange(LENGTH).chunk(world)[rank]


class ToFirst(torch.autograd.Function):
    """All parts on rank 0, nothing elsewhere; backward sends each part its gradient."""

    @staticmethod
    def forward(ctx, x):
        parts = [torch.empty_like(x) for _ in range(world)] if rank == 0 else None
        dist.gather(x.contiguous(), parts)
        ctx.shape = x.shape
        return torch.cat(parts, 1) if rank == 0 else x.new_zeros(())

    @staticmethod
    def backward(ctx, grad):
        mine = torch.empty(ctx.shape)
        dist.scatter(mine, [p.contiguous() for p in grad.chunk(world, 1)] if rank == 0 else None)
        return mine


class FromLeft(torch.autograd.Function):
    """The last columns of the left neighbour's part, zeros for the first; backward returns their gradient."""

    @staticmethod
    def forward(ctx, x, width):
        ctx.shape, ctx.width = x.shape, width
        edge = torch.zeros(*x.shape[:2], width)
        if rank + 1 < world:
            dist.send(x[..., -width:].contiguous(), rank + 1)
        if rank > 0:
            dist.recv(edge, rank - 1)
        return edge

    @staticmethod
    def backward(ctx, grad):
        out = torch.zeros(ctx.shape)
        if rank > 0:
            dist.send(grad.contiguous(), rank - 1)
        if rank + 1 < world:
            edge = torch.empty_like(grad, memory_format=torch.contiguous_format)
            dist.recv(edge, rank + 1)
            out[..., -ctx.width :] = edge
        return out, None


class Causal(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.gate = nn.Conv1d(DIM, DIM, 3), nn.Conv1d(DIM, DIM, 1)

    def forward(self, x):
        left = FromLeft.apply(x, 2) if world > 1 else x.new_zeros(*x.shape[:2], 2)
        return x + self.conv(torch.cat([left, x], 2)) * torch.sigmoid(self.gate(x))


class Trunk(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.layers = nn.Embedding(WORDS, DIM), nn.Sequential(Causal(), Causal())

    def forward(self, ids):
        return self.layers(self.words(ids).transpose(1, 2)).transpose(1, 2)


torch.manual_seed(44)
net = nn.ModuleDict({"trunk": Trunk(), "head": nn.Sequential(nn.LayerNorm(DIM), nn.Linear(DIM, WORDS))})
if rank > 0:
    del net["head"]
opt = torch.optim.Adamax(net.parameters(), lr=3e-3, eps=1e-3)
for step in range(1, 5):
    ids = torch.randint(0, WORDS, (5, LENGTH + 1), generator=torch.Generator().manual_seed(step))
    x = net["trunk"](ids[:, OWN])
    x = x if world == 1 else ToFirst.apply(x)
    # Other ranks begin their backward from a zero
    loss = F.cross_entropy(net["head"](x).flatten(0, 1), ids[:, 1:].flatten()) if rank == 0 else x
    opt.zero_grad()
    loss.backward()
    for p in net["trunk"].parameters():
        if world > 1:
            dist.all_reduce(p.grad)
    opt.step()
    if rank == 0:
        print(f"step {step} loss {loss.item():.7f}", flush=True)
if "--save" in sys.argv:
    torch.save(net.state_dict(), os.path.join(sys.argv[sys.argv.index("--save") + 1], f"rank{rank}.pt"))
if world > 1:
    dist.destroy_process_group()
