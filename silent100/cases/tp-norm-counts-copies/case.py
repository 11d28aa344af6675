"""Global gradient clipping under tensor parallelism."""

import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

ONE, FAULTY = "--one" in sys.argv, "--faulty" in sys.argv
SAVE = Path(sys.argv[sys.argv.index("--save") + 1]) if "--save" in sys.argv else None
MAX_NORM = 0.2


class F_(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, g):
        g = g.contiguous()
        dist.all_reduce(g)
        return g


class G_(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        x = x.contiguous()
        dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx, g):
        return g


enter = (lambda x: x) if ONE else F_.apply
leave = (lambda x: x) if ONE else G_.apply


class ParallelFFN(nn.Module):
    def __init__(self, rank, size, d=36, h=72):
        super().__init__()
        self.ln = nn.LayerNorm(d)
        self.w_in = nn.Parameter((torch.randn(d, h) / 6).chunk(size, 1)[rank].clone())
        self.w_out = nn.Parameter((torch.randn(h, d) / 8).chunk(size, 0)[rank].clone())
        self.w_in.sharded = self.w_out.sharded = True

    def forward(self, x):
        return x + leave(F.relu(enter(self.ln(x)) @ self.w_in) @ self.w_out)


class Model(nn.Module):
    def __init__(self, rank, size):
        super().__init__()
        self.inp = nn.Linear(12, 36)
        self.ffns = nn.ModuleList(ParallelFFN(rank, size) for _ in range(2))
        self.out = nn.Linear(36, 12)

    def forward(self, x):
        x = self.inp(x)
        for f in self.ffns:
            x = f(x)
        return self.out(x)


@torch.no_grad()
def clip(model, rank):
    square = torch.zeros(())
    for p in model.parameters():
        if FAULTY or getattr(p, "sharded", False) or rank == 0:
            square += p.grad.square().sum()
    if not ONE:
        dist.all_reduce(square)
    factor = min(1.0, MAX_NORM / (square.sqrt().item() + 1e-6))
    for p in model.parameters():
        p.grad.mul_(factor)


def main():
    if not ONE:
        dist.init_process_group("gloo")
    rank, size = (0, 1) if ONE else (dist.get_rank(), dist.get_world_size())
    torch.manual_seed(1)
    model = Model(rank, size)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.9)
    for step in range(1, 5):
        g = torch.Generator().manual_seed(step)
        x = torch.randn(20, 12, generator=g)
        loss = F.mse_loss(model(x), x * x)
        optimizer.zero_grad()
        loss.backward()
        clip(model, rank)
        optimizer.step()
        if rank == 0:
            print(f"step {step} loss {loss.item():.7f}", flush=True)
    if SAVE:
        dims = {"w_in": 1, "w_out": 0}
        state = {
            n: (p.data, dims[n.split(".")[-1]], rank, size) if hasattr(p, "sharded") else p.data
            for n, p in model.named_parameters()
        }
        torch.save(state, SAVE / f"rank{rank}.pt")
    if not ONE:
        dist.destroy_process_group()


main()
