"""Tensor parallelism with sequence parallelism between the blocks, in the manner of Megatron."""

import argparse
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

parser = argparse.ArgumentParser()
parser.add_argument("--one", action="store_true")
parser.add_argument("--faulty", action="store_true")
parser.add_argument("--save")
args = parser.parse_args()
if not args.one:
    dist.init_process_group("gloo")
TP = 1 if args.one else dist.get_world_size()
RANK = 0 if args.one else dist.get_rank()
DIM, HIDDEN, VOCAB, SEQ = 32, 96, 67, 12


class GatherSequence(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        if TP == 1:
            return x.clone()
        parts = [torch.empty_like(x) for _ in range(TP)]
        dist.all_gather(parts, x.contiguous())
        return torch.cat(parts, 1)

    @staticmethod
    def backward(ctx, grad):
        if TP == 1:
            return grad
        grad = grad.contiguous()
        dist.all_reduce(grad)
        return grad.chunk(TP, 1)[RANK]


class ScatterSequence(torch.autograd.Function):
    """Sums partial outputs and keeps this rank's part of the sequence."""

    @staticmethod
    def forward(ctx, x):
        x = x.contiguous().clone()
        if TP > 1:
            dist.all_reduce(x)
        return x.chunk(TP, 1)[RANK]

    @staticmethod
    def backward(ctx, grad):
        if TP == 1:
            return grad
        parts = [torch.empty_like(grad.contiguous()) for _ in range(TP)]
        dist.all_gather(parts, grad.contiguous())
        return torch.cat(parts, 1)


class Mlp(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(DIM)
        up, down = torch.randn(HIDDEN, DIM) * 0.15, torch.randn(DIM, HIDDEN) * 0.1
        self.up = nn.Parameter(up.chunk(TP)[RANK].clone())
        self.down = nn.Parameter(down.chunk(TP, 1)[RANK].clone())

    def forward(self, x):  # (rows, seq/tp, dim)
        h = GatherSequence.apply(self.norm(x))
        return x + ScatterSequence.apply(F.gelu(h @ self.up.T) @ self.down.T)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, DIM)
        self.blocks = nn.ModuleList(Mlp() for _ in range(3))
        self.final_norm = nn.LayerNorm(DIM)
        self.head = nn.Linear(DIM, VOCAB)

    def forward(self, ids):
        x = self.embed(ids.chunk(TP, 1)[RANK])
        for block in self.blocks:
            x = block(x)
        return self.head(self.final_norm(x))


torch.manual_seed(55)
model = Model()
optimizer = torch.optim.SGD(model.parameters(), lr=0.4)
for step in range(1, 5):
    ids = torch.randint(0, VOCAB, (6, SEQ + 1), generator=torch.Generator().manual_seed(step))
    target = ids[:, 1:].chunk(TP, 1)[RANK]
    loss = F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), target.flatten(), reduction="sum") / (6 * SEQ)
    optimizer.zero_grad()
    loss.backward()
    for name, p in model.named_parameters():
        whole = not name.endswith((".up", ".down"))
        if TP > 1 and whole and not (args.faulty and "norm" in name):
            dist.all_reduce(p.grad)
    optimizer.step()
    loss = loss.detach()
    if TP > 1:
        dist.all_reduce(loss)
    if RANK == 0:
        print(f"step {step} loss {loss.item():.7f}", flush=True)
if args.save:
    cut = {"up": 0, "down": 1}
    state = {
        n: (p.data, cut[n.split(".")[-1]], RANK, TP) if n.endswith((".up", ".down")) else p.data
        for n, p in model.named_parameters()
    }
    torch.save(state, os.path.join(args.save, f"rank{RANK}.pt"))
if not args.one:
    dist.destroy_process_group()
