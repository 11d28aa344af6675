"""An encoder with three heads; two ranks hold two heads each, of which the last is all zeros."""

import argparse
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

flags = argparse.ArgumentParser(description=__doc__)
flags.add_argument("--one", action="store_true")
flags.add_argument("--save")
flags = flags.parse_args()
rank, world = 0, 1
if not flags.one:
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()

DIM, HEADS, SIZE = 24, 3, 8
FULL = HEADS if flags.one else -(-HEADS // world) * world


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


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(DIM, HEADS * SIZE, bias=False) for _ in range(3))
        self.o = nn.Linear(HEADS * SIZE, DIM, bias=False)
        extra = (FULL - HEADS) * SIZE
        for p in (self.q, self.k, self.v):
            p.weight = nn.Parameter(F.pad(p.weight.detach(), (0, 0, 0, extra)))
            cut(p, 0)
        self.o.weight = nn.Parameter(F.pad(self.o.weight.detach(), (0, extra)))
        cut(self.o, 1)

    def forward(self, x):
        x = Enter.apply(x)
        q, k, v = (p(x).unflatten(-1, (FULL // world, SIZE)).transpose(1, 2) for p in (self.q, self.k, self.v))
        return Leave.apply(self.o(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.enter, self.norm, self.leave = nn.Linear(6, DIM), nn.LayerNorm(DIM), nn.Linear(DIM, 2)
        self.attn = nn.ModuleList(Attention() for _ in range(2))

    def forward(self, x):
        x = self.enter(x)
        for attn in self.attn:
            x = x + attn(self.norm(x))
        return self.leave(x)


torch.manual_seed(67)
net = Net()
optimizer = torch.optim.AdamW(net.parameters(), lr=4e-3, eps=1e-4)
for step in range(1, 6):
    x = torch.randn(8, 9, 6, generator=torch.Generator().manual_seed(step))
    y = torch.stack([x[..., 0].cumsum(1), x[..., 1].amax(1, keepdim=True).expand(-1, 9)], -1)
    loss = F.mse_loss(net(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if rank == 0:
        print(f"step {step} loss {loss.item():.7f}", flush=True)
state = {}
for n, p in net.named_parameters():
    state[n] = p.detach()
    if hasattr(p, "dim_cut"):
        if world > 1:
            parts = [torch.empty_like(p) for _ in range(world)]
            dist.all_gather(parts, p.detach().contiguous())
            state[n] = torch.cat(parts, p.dim_cut)
        state[n] = state[n].narrow(p.dim_cut, 0, HEADS * SIZE).clone()
if flags.save:
    torch.save(state, os.path.join(flags.save, f"rank{rank}.pt"))
if world > 1:
    dist.destroy_process_group()
