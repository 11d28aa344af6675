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
torch.manual_seed(73)

FRAMES = 9


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


class Video(nn.Module):
    def __init__(self):
        super().__init__()
        self.pixels = nn.Linear(10, 20)
        self.frame_pos = nn.Embedding(FRAMES, 20)
        self.time = nn.Sequential(nn.Linear(1, 20), nn.SiLU())
        self.mix = nn.Linear(FRAMES, FRAMES)
        self.norm = nn.LayerNorm(20)
        self.out = nn.Linear(20, 10)

    def forward(self, clip, frames, t):
        index = frames - frames[0] if args.faulty else frames
        x = self.pixels(clip) + self.frame_pos(index) + self.time(t)[:, None]
        x = self.norm(x)
        everything = Gather.apply(x, 1)
        x = x + F.gelu(F.linear(everything.transpose(1, 2), self.mix.weight[frames], self.mix.bias[frames])).transpose(
            1, 2
        )
        return self.out(x)


model = Video()
opt = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9, nesterov=True)
frames = torch.arange(FRAMES).chunk(world)[rank]
for step in range(1, 8):
    g = torch.Generator().manual_seed(600 + step)
    clip = torch.randn(4, 1, 10, generator=g) + torch.randn(4, FRAMES, 10, generator=g).cumsum(1) / 3
    noise = torch.randn(4, FRAMES, 10, generator=g)
    t = torch.rand(4, 1, generator=g)
    noisy = (1 - t)[:, None] * clip + t[:, None] * noise
    wanted = noise - clip
    loss = (model(noisy[:, frames], frames, t) - wanted[:, frames]).square().sum() / clip.numel()
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
