"""Feed-forward blocks cut over ranks by Megatron's pair of functions."""

import argparse
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

flags = argparse.ArgumentParser(description=__doc__)
flags.add_argument("--one", action="store_true")
flags.add_argument("--faulty", action="store_true")
flags.add_argument("--save")
flags = flags.parse_args()
rank, world = 0, 1
if not flags.one:
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()

DIM, HIDDEN = 16, 48


class Enter(torch.autograd.Function):
    """Identity; the gradient is summed over ranks."""

    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, g):
        g = g.contiguous().clone()
        if world > 1:
            dist.all_reduce(g)
        return g


class Leave(torch.autograd.Function):
    """Sums partial outputs; the gradient passes."""

    @staticmethod
    def forward(ctx, x):
        x = x.contiguous().clone()
        if world > 1:
            dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx, g):
        return g


def cut(linear, dim):
    """Keeps a rank's part of a layer's weight (and of its bias, if outputs are cut)."""
    linear.weight = nn.Parameter(linear.weight.detach().chunk(world, dim)[rank].clone())
    if dim == 0 and linear.bias is not None:
        linear.bias = nn.Parameter(linear.bias.detach().chunk(world)[rank].clone())
    linear.weight.dim_cut = dim
    return linear


class Mlp(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(DIM)
        self.up = cut(nn.Linear(DIM, HIDDEN, bias=False), 0)
        self.down = cut(nn.Linear(HIDDEN, DIM, bias=False), 1)

    def forward(self, x):
        partial = self.down(F.gelu(self.up(Enter.apply(self.norm(x)))))
        if flags.faulty:
            return Leave.apply(x + partial)
        return x + Leave.apply(partial)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.enter = nn.Linear(10, DIM)
        self.mlps = nn.ModuleList(Mlp() for _ in range(2))
        self.norm, self.leave = nn.LayerNorm(DIM), nn.Linear(DIM, 5)

    def forward(self, x):
        x = self.enter(x)
        for mlp in self.mlps:
            x = mlp(x)
        return self.leave(self.norm(x))


torch.manual_seed(44)
net = Net()
optimizer = torch.optim.Adam(net.parameters(), lr=5e-3, eps=1e-4)
for step in range(1, 6):
    x = torch.randn(20, 10, generator=torch.Generator().manual_seed(step))
    loss = F.cross_entropy(net(x), (x[:, :5] * x[:, 5:]).argmax(1))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if rank == 0:
        print(f"step {step} loss {loss.item():.7f}", flush=True)
state = {
    n: (p.detach(), p.dim_cut, rank, world) if hasattr(p, "dim_cut") else p.detach() for n, p in net.named_parameters()
}
if flags.save:
    torch.save(state, os.path.join(flags.save, f"rank{rank}.pt"))
if world > 1:
    dist.destroy_process_group()
