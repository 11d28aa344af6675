"""A two-layer net whose matrices are recut before every step."""

import os
import sys

import torch
import torch.distributed as dist
from torch import nn

ONE = "--one" in sys.argv
rank, world = 0, 1
if not ONE:
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()


class Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        x = x.clone()
        if world > 1:
            dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx, g):
        return g


class Shared(torch.autograd.Function):
    """Every rank uses the same tensor for its own part; gradients of parts add up."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, g):
        g = g.clone()
        if world > 1:
            dist.all_reduce(g)
        return g


class Cut(nn.Module):
    """A matrix of which a rank has some rows (dim 0) or columns (dim 1)."""

    def __init__(self, ins, outs):
        super().__init__()
        self.weight, self.outs, self.dim = (
            nn.Parameter(nn.Linear(ins, outs, bias=False).weight.chunk(world)[rank].detach().clone()),
            outs,
            0,
        )

    def recut(self, tensor, dim):
        parts = [torch.empty_like(tensor) for _ in range(world)]
        dist.all_gather(parts, tensor.contiguous())
        return torch.cat(parts, self.dim).chunk(world, dim)[rank].clone()

    def turn(self, optimizer):
        if world == 1:
            return
        old, dim = self.weight, 1 - self.dim
        self.weight = nn.Parameter(self.recut(old.detach(), dim))
        state = optimizer.state.pop(old)
        optimizer.state[self.weight] = {k: self.recut(v, dim) if v.ndim else v for k, v in state.items()}
        group = optimizer.param_groups[0]
        group["params"] = [self.weight if p is old else p for p in group["params"]]
        self.dim = dim

    def forward(self, x):
        if self.dim == 1:
            return Sum.apply(nn.functional.linear(Shared.apply(x).chunk(world, -1)[rank], self.weight))
        part = nn.functional.linear(Shared.apply(x), self.weight)
        at = rank * part.shape[-1]
        return Sum.apply(nn.functional.pad(part, (at, self.outs - at - part.shape[-1])))


torch.manual_seed(71)
model = nn.Sequential(Cut(8, 24), nn.Tanh(), nn.LayerNorm(24), Cut(24, 16), nn.Tanh(), nn.Linear(16, 4))
optimizer = torch.optim.Adam(model.parameters(), lr=4e-3, eps=1e-4)
for step in range(1, 5):
    x = torch.randn(10, 8, generator=torch.Generator().manual_seed(step))
    loss = nn.functional.cross_entropy(model(x), x[:, :4].argmin(1))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    for layer in model:
        if isinstance(layer, Cut):
            layer.turn(optimizer)
    if rank == 0:
        print(f"step {step} loss {loss.item():.7f}", flush=True)
if "--save" in sys.argv:
    state = dict(model.state_dict())
    for name, layer in model.named_children():
        if world > 1 and isinstance(layer, Cut):
            state[f"{name}.weight"] = (layer.weight.detach(), layer.dim, rank, world)
    torch.save(state, os.path.join(sys.argv[sys.argv.index("--save") + 1], f"rank{rank}.pt"))
if not ONE:
    dist.destroy_process_group()
