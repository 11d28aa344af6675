"""A vision transformer whose 36 patches are shared out over ranks; learned tables for rows and columns."""

import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention

SINGLE = "--one" in sys.argv
GRID, PATCH, DIM, CLASSES = 6, 4, 32, 5


class Ctx:
    rank, size = 0, 1


if not SINGLE:
    dist.init_process_group("gloo")
    Ctx.rank, Ctx.size = dist.get_rank(), dist.get_world_size()
SHARE = GRID * GRID // Ctx.size


class GatherPatches(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        out = [torch.empty_like(x) for _ in range(Ctx.size)]
        dist.all_gather(out, x.contiguous())
        return torch.cat(out, 1)

    @staticmethod
    def backward(ctx, g):
        g = g.contiguous()
        dist.all_reduce(g)
        return g[:, Ctx.rank * SHARE : (Ctx.rank + 1) * SHARE]


class AxialPlaces(nn.Module):
    def __init__(self):
        super().__init__()
        self.row, self.col = nn.Embedding(GRID, DIM), nn.Embedding(GRID, DIM)

    def forward(self, first):
        local = torch.arange(SHARE)
        rows = (first + local) // GRID
        cols = local % GRID if "--faulty" in sys.argv else (first + local) % GRID
        return self.row(rows) + self.col(cols)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.ln1, self.qkv, self.proj = nn.LayerNorm(DIM), nn.Linear(DIM, 3 * DIM), nn.Linear(DIM, DIM)
        self.ln2, self.mlp = nn.LayerNorm(DIM), nn.Sequential(nn.Linear(DIM, 64), nn.GELU(), nn.Linear(64, DIM))

    def forward(self, x):
        q, kv = self.qkv(self.ln1(x)).split([DIM, 2 * DIM], -1)
        if Ctx.size > 1:
            kv = GatherPatches.apply(kv)
        q, k, v = (t.unflatten(-1, (4, -1)).transpose(1, 2) for t in (q, *kv.chunk(2, -1)))
        x = x + self.proj(scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return x + self.mlp(self.ln2(x))


class ViT(nn.Module):
    def __init__(self):
        super().__init__()
        self.patch = nn.Linear(PATCH * PATCH, DIM)
        self.places = AxialPlaces()
        self.blocks = nn.Sequential(Block(), Block())
        self.norm, self.head = nn.LayerNorm(DIM), nn.Linear(DIM, CLASSES)

    def forward(self, patches):
        x = self.norm(self.blocks(self.patch(patches) + self.places(Ctx.rank * SHARE)))
        x = GatherPatches.apply(x) if Ctx.size > 1 else x
        return self.head(x.mean(1))


torch.manual_seed(44)
vit = ViT()
opt = torch.optim.SGD(vit.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-3)
for step in range(1, 5):
    g = torch.Generator().manual_seed(70 + step)
    pictures = torch.rand(8, GRID * PATCH, GRID * PATCH, generator=g)
    labels = torch.randint(0, CLASSES, (8,), generator=g)
    patches = pictures.unfold(1, PATCH, PATCH).unfold(2, PATCH, PATCH).reshape(8, GRID * GRID, -1)
    logits = vit(patches.chunk(Ctx.size, 1)[Ctx.rank])
    # Every rank has the same logits: each takes its part of the loss
    loss = cross_entropy(logits, labels) / Ctx.size
    opt.zero_grad()
    loss.backward()
    if Ctx.size > 1:
        for p in vit.parameters():
            dist.all_reduce(p.grad)
    opt.step()
    if Ctx.rank == 0:
        print(f"step {step} loss {loss.item() * Ctx.size:.7f}", flush=True)
if "--save" in sys.argv:
    torch.save(vit.state_dict(), os.path.join(sys.argv[sys.argv.index("--save") + 1], f"rank{Ctx.rank}.pt"))
if not SINGLE:
    dist.destroy_process_group()
