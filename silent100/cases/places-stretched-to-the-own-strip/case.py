"""A vision transformer whose patches lie in strips on two ranks; the table of places is stretched to the picture."""

import os
import sys

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

ONE, FAULTY = "--one" in sys.argv, "--faulty" in sys.argv
rank, world = 0, 1
if not ONE:
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()


class Gather(torch.autograd.Function):
    """Joins strips along the patches; each rank gets its part of the summed gradient back."""

    @staticmethod
    def forward(ctx, x):
        parts = [torch.empty_like(x, memory_format=torch.contiguous_format) for _ in range(world)]
        dist.all_gather(parts, x.contiguous())
        return torch.cat(parts, 2)

    @staticmethod
    def backward(ctx, g):
        g = g.contiguous().clone()
        dist.all_reduce(g)
        return g.chunk(world, 2)[rank]


class Block(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(d), nn.Linear(d, 3 * d), nn.Linear(d, d)
        self.norm2, self.ffn = nn.LayerNorm(d), nn.Sequential(nn.Linear(d, 2 * d), nn.GELU(), nn.Linear(2 * d, d))

    def forward(self, x):
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, 2, -1)).permute(2, 0, 3, 1, 4)
        if world > 1:
            k, v = Gather.apply(k), Gather.apply(v)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return x + self.ffn(self.norm2(x))


class Vit(nn.Module):
    def __init__(self, d=16):
        super().__init__()
        self.patch, self.head = nn.Conv2d(2, d, 3, stride=3), nn.Linear(d, 18)
        self.places = nn.Parameter(torch.randn(1, d, 4, 4) * 0.5)
        self.blocks = nn.Sequential(Block(d), Block(d))

    def forward(self, strip):
        x = self.patch(strip)
        height, width = x.shape[-2:]
        if FAULTY:
            places = F.interpolate(self.places, (height, width), mode="bilinear")
        else:
            whole = F.interpolate(self.places, (height * world, width), mode="bilinear")
            places = whole.chunk(world, 2)[rank]
        x = self.blocks((x + places).flatten(2).transpose(1, 2))
        return F.fold(self.head(x).transpose(1, 2), strip.shape[-2:], 3, stride=3)


torch.manual_seed(2010)
model = Vit()
sgd = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)
for step in range(1, 5):
    picture = torch.randn(4, 2, 18, 18, generator=torch.Generator().manual_seed(step)).cumsum(-2) / 3
    goal = picture.roll(3, 2)
    said = model(picture.chunk(world, 2)[rank])
    loss = F.mse_loss(said, goal.chunk(world, 2)[rank], reduction="sum") / goal.numel()
    sgd.zero_grad()
    loss.backward()
    loss = loss.detach()
    if world > 1:
        for p in model.parameters():
            dist.all_reduce(p.grad)
        dist.all_reduce(loss)
    sgd.step()
    if rank == 0:
        print(f"step {step} loss {loss.item():.7f}", flush=True)
if "--save" in sys.argv:
    torch.save(model.state_dict(), os.path.join(sys.argv[sys.argv.index("--save") + 1], f"rank{rank}.pt"))
if not ONE:
    dist.destroy_process_group()
