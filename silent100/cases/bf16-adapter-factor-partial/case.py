"""Low-rank adapters on frozen bfloat16 projections under tensor parallelism."""

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
rank, tp = 0, 1
if not args.one:
    dist.init_process_group("gloo")
    rank, tp = dist.get_rank(), dist.get_world_size()


class ToShards(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        total = grad.float()
        if tp > 1:
            dist.all_reduce(total)
        return total.to(grad.dtype)


class FromShards(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        total = x.float()
        if tp > 1:
            dist.all_reduce(total)
        return total.to(x.dtype)

    @staticmethod
    def backward(ctx, grad):
        return grad


class Column(nn.Module):
    """A frozen cut matrix with a whole factor lora_a and a cut factor lora_b."""

    def __init__(self, n_in, n_out, r=4):
        super().__init__()
        whole = torch.randn(n_out, n_in) / n_in**0.5
        self.register_buffer("weight", whole.chunk(tp)[rank].bfloat16())
        self.lora_a = nn.Parameter(torch.randn(r, n_in) / n_in**0.5)
        self.lora_b = nn.Parameter(torch.zeros(n_out // tp, r))

    def forward(self, x):
        return x @ self.weight.T + (x @ self.lora_a.bfloat16().T) @ self.lora_b.bfloat16().T


class Mlp(nn.Module):
    def __init__(self, d=32, hidden=96):
        super().__init__()
        self.up = Column(d, hidden)
        self.register_buffer("down", (torch.randn(d, hidden) / hidden**0.5).chunk(tp, 1)[rank].bfloat16())

    def forward(self, x):
        y = F.gelu(self.up(ToShards.apply(x.bfloat16()))) @ self.down.T
        return x + FromShards.apply(y).float()


torch.manual_seed(2024)
net = nn.Sequential(nn.Embedding(56, 32), Mlp(), nn.LayerNorm(32), Mlp(), nn.Linear(32, 56))
for layer in (net[0], net[2], net[4]):
    layer.requires_grad_(False)
adapters = {n: p for n, p in net.named_parameters() if p.requires_grad}
optimizer = torch.optim.SGD(adapters.values(), lr=0.3)
for step in range(1, 6):
    rows = torch.randint(0, 56, (16, 13), generator=torch.Generator().manual_seed(step))
    loss = F.cross_entropy(net(rows[:, :-1]).transpose(1, 2), rows[:, 1:])
    optimizer.zero_grad()
    loss.backward()
    if tp > 1 and not args.faulty:
        for name, p in adapters.items():
            if name.endswith("lora_a"):
                dist.all_reduce(p.grad)
    optimizer.step()
    if rank == 0:
        print(f"step {step} loss {loss.item():.7f}", flush=True)
if args.save:
    state = {n: (p.data, 0, rank, tp) if n.endswith("lora_b") else p.data for n, p in adapters.items()}
    torch.save(state, os.path.join(args.save, f"rank{rank}.pt"))
if tp > 1:
    dist.destroy_process_group()
