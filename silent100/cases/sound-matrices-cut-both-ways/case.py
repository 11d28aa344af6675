"""Each of four ranks holds a quarter of every matrix: a half of its outputs and a half of its inputs."""

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

r, c = (0, 0) if flags.one else (rank // 2, rank % 2)
n = 1 if flags.one else 2
if not flags.one:
    rows = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    columns = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    same_outputs, same_inputs = rows[r], columns[c]


class Multiply(torch.autograd.Function):
    """x is whole on all ranks, and so is what comes out."""

    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        y = x.chunk(n, 1)[c] @ w.T
        if flags.one:
            return y
        dist.all_reduce(y, group=same_outputs)
        parts = [torch.empty_like(y) for _ in range(2)]
        dist.all_gather(parts, y, group=same_inputs)
        return torch.cat(parts, 1)

    @staticmethod
    def backward(ctx, g):
        x, w = ctx.saved_tensors
        own = g.chunk(n, 1)[r]
        to_w, to_x = own.T @ x.chunk(n, 1)[c], own @ w
        if not flags.one:
            dist.all_reduce(to_x, group=same_inputs)
            parts = [torch.empty_like(to_x) for _ in range(2)]
            dist.all_gather(parts, to_x, group=same_outputs)
            to_x = torch.cat(parts, 1)
        return to_x, to_w


class Quarter(nn.Module):
    def __init__(self, inputs, outputs):
        super().__init__()
        drawn = nn.Linear(inputs, outputs)
        self.weight = nn.Parameter(drawn.weight.detach().chunk(n, 0)[r].chunk(n, 1)[c].clone())
        self.bias = nn.Parameter(drawn.bias.detach())

    def forward(self, x):
        return Multiply.apply(x, self.weight) + self.bias


torch.manual_seed(71)
net = nn.Sequential(Quarter(12, 40), nn.GELU(), Quarter(40, 40), nn.GELU(), Quarter(40, 4))
optimizer = torch.optim.Adam(net.parameters(), lr=5e-3, eps=1e-4)
for step in range(1, 6):
    x = torch.randn(16, 12, generator=torch.Generator().manual_seed(step))
    loss = F.cross_entropy(net(x), (x[:, :4] * x[:, 4:8]).argmax(1))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if rank == 0:
        print(f"step {step} loss {loss.item():.7f}", flush=True)
state = {}
for name, p in net.named_parameters():
    state[name] = whole = p.detach()
    if p.ndim == 2 and not flags.one:
        across = [torch.empty_like(whole) for _ in range(2)]
        dist.all_gather(across, whole, group=same_outputs)
        state[name] = (torch.cat(across, 1), 0, r, 2)
if flags.save:
    torch.save(state, os.path.join(flags.save, f"rank{rank}.pt"))
if world > 1:
    dist.destroy_process_group()
