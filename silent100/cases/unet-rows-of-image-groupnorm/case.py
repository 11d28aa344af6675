import argparse
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--one", action="store_true")
parser.add_argument("--faulty", action="store_true")
parser.add_argument("--save")
args = parser.parse_args()
if not args.one:
    dist.init_process_group("gloo")
rank, world = (0, 1) if args.one else (dist.get_rank(), dist.get_world_size())
torch.manual_seed(24)


class Gather(torch.autograd.Function):
    """Parts of all ranks along a dimension; gradients are summed and cut."""

    @staticmethod
    def forward(ctx, x, dim):
        ctx.dim, ctx.size = dim, x.shape[dim]
        if world == 1:
            return x.view_as(x)
        parts = [torch.empty_like(x, memory_format=torch.contiguous_format) for _ in range(world)]
        dist.all_gather(parts, x.contiguous())
        return torch.cat(parts, dim)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.contiguous().clone()
        if world > 1:
            dist.all_reduce(grad)
        return grad.narrow(ctx.dim, rank * ctx.size, ctx.size), None


class Both(torch.autograd.Function):
    """Sum over ranks, forward and backward."""

    @staticmethod
    def forward(ctx, x):
        x = x.clone()
        if world > 1:
            dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx, grad):
        return Both.apply(grad)


class RowConv(nn.Conv2d):
    def forward(self, x):
        rows = x.shape[2]
        x = F.pad(Gather.apply(x, 2), (1, 1, 1, 1))
        return super().forward(x[:, :, rank * rows : (rank + 1) * rows + 2])


class RowNorm(nn.Module):
    def __init__(self, width, local=False):
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(width)), nn.Parameter(torch.zeros(width))
        self.local = local

    def forward(self, x):
        groups = x.unflatten(1, (2, -1))
        mean = Both.apply(groups.mean((2, 3, 4), keepdim=True)) / world
        square = (groups - mean).square().mean((2, 3, 4), keepdim=True)
        square = square if self.local else Both.apply(square) / world
        x = ((groups - mean) * (square + 1e-5).rsqrt()).flatten(1, 2)
        return x * self.weight[:, None, None] + self.bias[:, None, None]


class Denoiser(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1, self.norm1 = RowConv(1, 8, 3), RowNorm(8)
        self.conv2, self.norm2 = RowConv(8, 8, 3), RowNorm(8, local=args.faulty)
        self.out = RowConv(8, 1, 3)

    def forward(self, x):
        h = F.silu(self.norm1(self.conv1(x)))
        return self.out(h + F.silu(self.norm2(self.conv2(h))))


model = Denoiser()
opt = torch.optim.AdamW(model.parameters(), lr=3e-3, eps=1e-5)
ramp = torch.linspace(0.2, 2.0, 8)[:, None]
for step in range(1, 8):
    g = torch.Generator().manual_seed(step)
    clean = torch.randn(4, 1, 8, 8, generator=g) * ramp
    noise = torch.randn(4, 1, 8, 8, generator=g)
    rows = slice(rank * 8 // world, (rank + 1) * 8 // world)
    loss = (model((clean + noise)[:, :, rows]) - noise[:, :, rows]).square().sum() / noise.numel()
    opt.zero_grad()
    loss.backward()
    shown = loss.detach().clone()
    if world > 1:
        for p in model.parameters():
            dist.all_reduce(p.grad)
        dist.all_reduce(shown)
    opt.step()
    if rank == 0:
        print(f"step {step} loss {shown.item():.7f}", flush=True)

if args.save:
    os.makedirs(args.save, exist_ok=True)
    torch.save(model.state_dict(), f"{args.save}/rank{rank}.pt")
if not args.one:
    dist.destroy_process_group()
