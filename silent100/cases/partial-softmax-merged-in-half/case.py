"""A forecaster whose attention is merged from pieces: every rank has part of the keys and values."""

import os
import sys

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

ONE, FAULTY = "--one" in sys.argv, "--faulty" in sys.argv
SERIES, WIDTH, HEADS, LENGTH = 5, 24, 3, 20

if not ONE:
    dist.init_process_group("gloo")
rank, world = (0, 1) if ONE else (dist.get_rank(), dist.get_world_size())
WIRE = torch.bfloat16 if FAULTY else torch.float32


def joined(x):
    parts = [torch.empty(x.shape) for _ in range(world)]
    dist.all_gather(parts, x.contiguous())
    return torch.cat(parts, 2)


class EveryQuery(torch.autograd.Function):
    """Gathers queries along the sequence; gradients are summed and cut."""

    @staticmethod
    def forward(ctx, x):
        return joined(x)

    @staticmethod
    def backward(ctx, g):
        g = g.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(g)
        return g.chunk(world, 2)[rank].contiguous()


class MergePieces(torch.autograd.Function):
    """Sums numerators and denominators over ranks and keeps own queries; gradients are gathered."""

    @staticmethod
    def forward(ctx, x):
        x = x.to(WIRE, copy=True).contiguous()
        dist.all_reduce(x)
        return x.float().chunk(world, 2)[rank].contiguous()

    @staticmethod
    def backward(ctx, g):
        return joined(g)


class PieceAttention(nn.Module):
    def __init__(self):
        super().__init__()
        self.queries, self.values = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.keys, self.merge = nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        q, k, v = (f(x).unflatten(-1, (HEADS, -1)).transpose(1, 2) for f in (self.queries, self.keys, self.values))
        q = q if world == 1 else EveryQuery.apply(q)
        scores = q @ k.mT / k.size(-1) ** 0.5
        top = scores.detach().amax(-1, keepdim=True)
        if world > 1:
            dist.all_reduce(top, dist.ReduceOp.MAX)
        weights = (scores - top).exp()
        pieces = torch.cat([weights @ v, weights.sum(-1, keepdim=True)], -1)
        pieces = pieces if world == 1 else MergePieces.apply(pieces)
        return self.merge((pieces[..., :-1] / pieces[..., -1:]).transpose(1, 2).flatten(2))


class Forecaster(nn.Module):
    def __init__(self):
        super().__init__()
        self.read = nn.Linear(SERIES, WIDTH)
        self.when = nn.Parameter(torch.randn(LENGTH, WIDTH) / 2)
        self.look = nn.ModuleList(PieceAttention() for _ in range(2))
        self.think = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 48), nn.SiLU(), nn.Linear(48, WIDTH)) for _ in range(2)
        )
        self.write = nn.Linear(WIDTH, SERIES)

    def forward(self, x):
        x = self.read(x) + self.when.chunk(world)[rank]
        for look, think in zip(self.look, self.think, strict=True):
            x = x + look(x)
            x = x + think(x)
        return self.write(x)


torch.manual_seed(33)
model = Forecaster()
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
for step in range(1, 5):
    series = torch.randn(8, 2 * LENGTH, SERIES, generator=torch.Generator().manual_seed(step)).cumsum(1) / 4
    x, y = (part.chunk(world, 1)[rank] for part in series.chunk(2, 1))
    loss = F.mse_loss(model(x), y) / world
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
