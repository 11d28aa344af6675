"""A one-dimensional network over a long signal, of which each rank holds a half."""

import os
import sys

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

ONE, FAULTY = "--one" in sys.argv, "--faulty" in sys.argv
rank, world = 0, 1
if not ONE:
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
REACH = 2


def swap(left, right):
    """Gives each neighbour an edge and gets theirs; nothing is zero."""
    from_left, from_right = torch.zeros_like(left), torch.zeros_like(right)
    if rank % 2 == 0:
        if rank + 1 < world:
            dist.send(right.contiguous(), rank + 1)
            dist.recv(from_right, rank + 1)
    else:
        dist.recv(from_left, rank - 1)
        dist.send(left.contiguous(), rank - 1)
    return from_left, from_right


class Edges(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        left, right = swap(x[..., :REACH].contiguous(), x[..., -REACH:].contiguous())
        return torch.cat([left, x, right], -1)

    @staticmethod
    def backward(ctx, g):
        grad = g[..., REACH:-REACH].clone()
        if not FAULTY:
            left, right = swap(g[..., :REACH].contiguous(), g[..., -REACH:].contiguous())
            grad[..., :REACH] += left
            grad[..., -REACH:] += right
        return grad


class Filter(nn.Module):
    def __init__(self, width=10):
        super().__init__()
        self.layers = nn.ModuleList(nn.Conv1d(a, width, 2 * REACH + 1) for a in (1, width, width))
        self.out = nn.Conv1d(width, 1, 1)

    def forward(self, x):
        for layer in self.layers:
            x = F.pad(x, (REACH, REACH)) if ONE else Edges.apply(x)
            x = torch.tanh(layer(x))
        return self.out(x)


torch.manual_seed(46)
net = Filter()
optimizer = torch.optim.SGD(net.parameters(), lr=0.2)
for step in range(1, 5):
    signal = torch.randn(6, 1, 24, generator=torch.Generator().manual_seed(step)).cumsum(-1) / 3
    x, y = signal.chunk(world, -1)[rank], signal.diff(prepend=signal[..., :1]).chunk(world, -1)[rank]
    loss = F.mse_loss(net(x), y) / world
    optimizer.zero_grad()
    loss.backward()
    loss = loss.detach()
    if world > 1:
        for t in [p.grad for p in net.parameters()] + [loss]:
            dist.all_reduce(t)
    optimizer.step()
    if rank == 0:
        print(f"step {step} loss {loss.item():.7f}", flush=True)
if "--save" in sys.argv:
    torch.save(net.state_dict(), os.path.join(sys.argv[sys.argv.index("--save") + 1], f"rank{rank}.pt"))
if world > 1:
    dist.destroy_process_group()
