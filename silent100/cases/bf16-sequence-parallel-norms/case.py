"""Megatron-like sequence parallelism under bfloat16 autocast."""

import argparse
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

cli = argparse.ArgumentParser()
cli.add_argument("--one", action="store_true")
cli.add_argument("--faulty", action="store_true")
cli.add_argument("--save")
args = cli.parse_args()
if not args.one:
    dist.init_process_group("gloo")
RANK, SIZE = (0, 1) if args.one else (dist.get_rank(), dist.get_world_size())


def gathered(x):
    parts = [torch.empty_like(x) for _ in range(SIZE)]
    dist.all_gather(parts, x.contiguous())
    return torch.cat(parts, 1)


def summed(x):
    x = x.float()
    dist.all_reduce(x)
    return x


class Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return gathered(x) if SIZE > 1 else x.clone()

    @staticmethod
    def backward(ctx, g):
        return summed(g).to(g.dtype).chunk(SIZE, 1)[RANK] if SIZE > 1 else g


class Scatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return summed(x).to(x.dtype).chunk(SIZE, 1)[RANK] if SIZE > 1 else x.clone()

    @staticmethod
    def backward(ctx, g):
        return gathered(g) if SIZE > 1 else g


class Block(nn.Module):
    def __init__(self, d, h):
        super().__init__()
        self.norm = nn.LayerNorm(d)
        self.w1 = nn.Parameter((torch.randn(h, d) * 0.15).chunk(SIZE)[RANK].clone())
        self.w2 = nn.Parameter((torch.randn(d, h) * 0.1).chunk(SIZE, 1)[RANK].clone())

    def forward(self, x):
        h = Gather.apply(self.norm(x))
        return x + Scatter.apply(F.linear(F.gelu(F.linear(h, self.w1)), self.w2))


class Lm(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(64, 32), nn.Linear(32, 64)
        self.blocks = nn.ModuleList(Block(32, 128) for _ in range(3))
        self.norm = nn.LayerNorm(32)

    def forward(self, ids):
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


torch.manual_seed(71)
model = Lm()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(1, 4):
    rows = torch.randint(0, 64, (8, 17), generator=torch.Generator().manual_seed(step))
    ids, labels = rows[:, :-1].chunk(SIZE, 1)[RANK], rows[:, 1:].chunk(SIZE, 1)[RANK]
    with torch.autocast("cpu", torch.bfloat16):
        logits = model(ids)
    loss = F.cross_entropy(logits.float().flatten(0, 1), labels.flatten()) / SIZE
    optimizer.zero_grad()
    loss.backward()
    loss = loss.detach()
    if SIZE > 1:
        for name, p in model.named_parameters():
            if not name.endswith(("w1", "w2")) and not (args.faulty and "norm" in name):
                dist.all_reduce(p.grad)
        dist.all_reduce(loss)
    optimizer.step()
    if RANK == 0:
        print(f"step {step} loss {loss.item():.7f}", flush=True)
if args.save:
    cut = {"w1": 0, "w2": 1}
    state = {n: (p.data, cut[n[-2:]], RANK, SIZE) if n[-2:] in cut else p.data for n, p in model.named_parameters()}
    torch.save(state, os.path.join(args.save, f"rank{RANK}.pt"))
if not args.one:
    dist.destroy_process_group()
