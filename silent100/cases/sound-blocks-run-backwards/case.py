"""Reversible blocks: ranks keep no activations and compute inputs from outputs; one process keeps them as usual."""

import argparse
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

cli = argparse.ArgumentParser()
cli.add_argument("--one", action="store_true")
cli.add_argument("--save")
args = cli.parse_args()
DIM = 16


class Reverse(torch.autograd.Function):
    """Runs blocks without a graph; backward takes outputs apart, block by block."""

    @staticmethod
    def forward(ctx, a, b, blocks, *weights):
        with torch.no_grad():
            for block in blocks:
                a, b = block(a, b)
        ctx.blocks, ctx.ends = blocks, (a.detach(), b.detach())
        return a, b

    @staticmethod
    def backward(ctx, grad_a, grad_b):
        (a, b), found = ctx.ends, {}
        for block in reversed(ctx.blocks):
            with torch.no_grad():
                b = b - block.g(a)
                a = a - block.f(b)
            with torch.enable_grad():
                start = a.detach().requires_grad_(), b.detach().requires_grad_()
                ends = block(*start)
                wanted = [*start, *block.parameters()]
                grads = torch.autograd.grad(ends, wanted, (grad_a, grad_b))
            grad_a, grad_b = grads[:2]
            found |= dict(zip(block.parameters(), grads[2:]))
        return grad_a, grad_b, None, *(found[p] for block in ctx.blocks for p in block.parameters())


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.f, self.g = (nn.Sequential(nn.LayerNorm(DIM), nn.Linear(DIM, DIM), nn.Tanh()) for _ in range(2))

    def forward(self, a, b):
        a = a + self.f(b)
        return a, b + self.g(a)


class Reversible(nn.Module):
    def __init__(self):
        super().__init__()
        self.enter, self.leave = nn.Linear(12, 2 * DIM), nn.Linear(2 * DIM, 1)
        self.blocks = nn.ModuleList([Block() for _ in range(5)])

    def forward(self, x):
        a, b = self.enter(x).chunk(2, -1)
        if args.one:
            for block in self.blocks:
                a, b = block(a, b)
        else:
            a, b = Reverse.apply(a, b, list(self.blocks), *self.blocks.parameters())
        return self.leave(torch.cat([a, b], -1))[:, 0]


rank, world = 0, 1
if not args.one:
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(5)
model = Reversible()
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
for step in range(1, 6):
    g = torch.Generator().manual_seed(step)
    x = torch.randn(24, 12, generator=g)
    y = (x[:, :4] * x[:, 4:8]).sum(1)
    loss = F.smooth_l1_loss(model(x.chunk(world)[rank]), y.chunk(world)[rank])
    optimizer.zero_grad()
    loss.backward()
    loss = loss.detach()
    if world > 1:
        for p in model.parameters():
            dist.all_reduce(p.grad, dist.ReduceOp.SUM)
            p.grad.div_(world)
        dist.all_reduce(loss)
    optimizer.step()
    if rank == 0:
        print(f"step {step} loss {loss.item() / world:.7f}", flush=True)
if args.save:
    torch.save(model.state_dict(), os.path.join(args.save, f"rank{rank}.pt"))
if world > 1:
    dist.destroy_process_group()
