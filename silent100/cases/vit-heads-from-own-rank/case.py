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
torch.manual_seed(59)

HEADS = 4


class Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, dim, shift):
        ctx.dim, ctx.size, ctx.shift = dim, x.shape[dim], shift
        if world == 1:
            return x.clone()
        parts = [torch.empty_like(x, memory_format=torch.contiguous_format) for _ in range(world)]
        dist.all_gather(parts, x.contiguous())
        return torch.cat(parts[shift:] + parts[:shift], dim)

    @staticmethod
    def backward(ctx, grad):
        grad = torch.roll(grad, ctx.shift * ctx.size, ctx.dim)
        if world > 1:
            dist.all_reduce(grad)
        return grad.narrow(ctx.dim, rank * ctx.size, ctx.size), None, None


class Attention(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x):
        few, n = HEADS // world, x.shape[1]
        qkv = Gather.apply(self.qkv(x), 1, 0).unflatten(-1, (3, HEADS, -1))
        q, k, v = qkv[:, :, :, rank * few : (rank + 1) * few].permute(2, 0, 3, 1, 4)
        out = F.scaled_dot_product_attention(q, k, v)
        out = Gather.apply(out, 1, rank if args.faulty else 0)
        out = out[:, :, rank * n : (rank + 1) * n].transpose(1, 2).flatten(2)
        return self.proj(out)


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm1, self.attn, self.norm2 = nn.LayerNorm(width), Attention(width), nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 32), nn.GELU(), nn.Linear(32, width))

    def forward(self, x):
        x = x + self.attn(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class Vision(nn.Module):
    def __init__(self):
        super().__init__()
        self.patch, self.pos = nn.Linear(12, 16), nn.Parameter(torch.randn(8, 16) * 0.3)
        self.blocks = nn.ModuleList([Block(16), Block(16)])
        self.pixels = nn.Linear(16, 12)

    def forward(self, x, where):
        x = self.patch(x) + self.pos[where]
        for block in self.blocks:
            x = block(x)
        return self.pixels(x)


model = Vision()
opt = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)
where = torch.arange(8).chunk(world)[rank]
for step in range(1, 8):
    g = torch.Generator().manual_seed(step)
    image = torch.randn(4, 8, 12, generator=g).cumsum(1)
    hidden = image * (torch.rand(4, 8, 1, generator=g) > 0.4)
    loss = (model(hidden[:, where], where) - image[:, where]).square().sum() / image.numel()
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
