"""Sharded optimizer states whose owners change in turn, so that no machine wears out."""

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


def owner(i, step):
    return (i + 3 * step) % world


def adam(p, state, t, rate=3e-3, b1=0.9, b2=0.98, eps=1e-4):
    state[0].mul_(b1).add_(p.grad, alpha=1 - b1)
    state[1].mul_(b2).addcmul_(p.grad, p.grad, value=1 - b2)
    p.data -= rate * (state[0] / (1 - b1**t)) / ((state[1] / (1 - b2**t)).sqrt() + eps)


torch.manual_seed(151)
model = nn.Sequential(
    nn.Conv1d(2, 10, 3, padding=1), nn.GELU(), nn.Conv1d(10, 10, 3, padding=1), nn.GELU(), nn.AdaptiveAvgPool1d(2),
    nn.Flatten(), nn.Linear(20, 3),
)  # fmt: skip
weights = list(model.parameters())
moments = {i: torch.zeros(2, *p.shape) for i, p in enumerate(weights) if owner(i, 1) == rank}
for step in range(1, 5):
    x = torch.randn(16, 2, 14, generator=torch.Generator().manual_seed(step))
    y = torch.stack([x[:, 0].mean(1), x[:, 1].std(1), (x[:, 0] * x[:, 1]).mean(1)], 1)
    loss = nn.functional.mse_loss(model(x[rank::world]), y[rank::world]) / world
    model.zero_grad()
    loss.backward()
    shown = loss.detach()
    if world > 1:
        dist.all_reduce(shown)
    for i, p in enumerate(weights):
        mine, nexts = owner(i, step), owner(i, step + 1)
        if world > 1:
            dist.reduce(p.grad, mine)
        if rank == mine:
            adam(p, moments[i], step)
        if world > 1:
            dist.broadcast(p.data, mine)
            if rank == mine:
                dist.send(moments.pop(i), nexts)
            elif rank == nexts:
                moments[i] = torch.empty(2, *p.shape)
                dist.recv(moments[i], mine)
    if rank == 0:
        print(f"step {step} loss {shown.item():.7f}", flush=True)
if "--save" in sys.argv:
    torch.save(model.state_dict(), os.path.join(sys.argv[sys.argv.index("--save") + 1], f"rank{rank}.pt"))
if not ONE:
    dist.destroy_process_group()
