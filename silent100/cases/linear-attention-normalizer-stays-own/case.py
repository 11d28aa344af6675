"""A bidirectional encoder with linear attention; each rank has a piece of every sequence."""

import os
import sys

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

ONE, FAULTY = "--one" in sys.argv, "--faulty" in sys.argv
SYMBOLS, WIDTH, HEADS, LENGTH = 33, 32, 4, 24

if not ONE:
    dist.init_process_group("gloo")
rank, world = (0, 1) if ONE else (dist.get_rank(), dist.get_world_size())


class SumOverPieces(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        x = x.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx, g):
        g = g.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(g)
        return g


def over_pieces(x):
    return x if world == 1 else SumOverPieces.apply(x)


class LinearAttention(nn.Module):
    def __init__(self):
        super().__init__()
        self.mixed = nn.Linear(WIDTH, 3 * WIDTH)
        self.back = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        q, k, v = (t.unflatten(-1, (HEADS, -1)) for t in self.mixed(x).chunk(3, -1))
        q, k = F.elu(q) + 1, F.elu(k) + 1
        memory = over_pieces(torch.einsum("blhd,blhe->bhde", k, v) / LENGTH)
        weight = k.sum(1) / x.size(1) if FAULTY else over_pieces(k.sum(1) / LENGTH)
        y = torch.einsum("blhd,bhde->blhe", q, memory) / torch.einsum("blhd,bhd->blh", q, weight)[..., None]
        return self.back(y.flatten(2))


class Encoder(nn.Module):
    def __init__(self, depth):
        super().__init__()
        self.symbols = nn.Embedding(SYMBOLS, WIDTH)
        self.places = nn.Parameter(torch.randn(LENGTH, WIDTH) / 2)
        self.lin = nn.ModuleList(LinearAttention() for _ in range(depth))
        self.ffn = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 64), nn.ReLU(), nn.Linear(64, WIDTH))
            for _ in range(depth)
        )
        self.ln = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(depth))
        self.logits = nn.Linear(WIDTH, SYMBOLS)

    def forward(self, ids):
        x = self.symbols(ids) + self.places.chunk(world)[rank]
        for lin, ffn, ln in zip(self.lin, self.ffn, self.ln, strict=True):
            x = x + lin(ln(x))
            x = x + ffn(x)
        return self.logits(x)


torch.manual_seed(2)
model = Encoder(3)
optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)
for step in range(1, 5):
    g = torch.Generator().manual_seed(step)
    whole = torch.randint(1, SYMBOLS, (6, LENGTH), generator=g)
    hidden = torch.rand(whole.shape, generator=g) < 0.3
    ids, labels = whole.where(~hidden, 0).chunk(world, 1)[rank], whole.where(hidden, -100).chunk(world, 1)[rank]
    loss = F.cross_entropy(model(ids).flatten(0, 1), labels.flatten(), reduction="sum") / hidden.sum()
    optimizer.zero_grad()
    loss.backward()
    shown = loss.detach()
    if world > 1:
        for p in model.parameters():
            dist.all_reduce(p.grad)
        dist.all_reduce(shown)
    optimizer.step()
    if rank == 0:
        print(f"step {step} loss {shown.item():.7f}", flush=True)
if "--save" in sys.argv:
    torch.save(model.state_dict(), os.path.join(sys.argv[sys.argv.index("--save") + 1], f"rank{rank}.pt"))
if not ONE:
    dist.destroy_process_group()
