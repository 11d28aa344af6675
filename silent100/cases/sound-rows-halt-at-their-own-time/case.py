"""Adaptive computation: rows think for as long as they like."""

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


class Thinker(nn.Module):
    def __init__(self, width=16, most=9):
        super().__init__()
        self.read, self.cell = nn.Linear(5, width), nn.GRUCell(width, width)
        self.halt, self.answer, self.most = nn.Linear(width, 1), nn.Linear(width, 2), most

    def forward(self, x):
        seen = self.read(x)
        h, out = torch.zeros_like(seen), torch.zeros_like(seen)
        left, cost = torch.ones(len(x), 1), torch.zeros(len(x), 1)
        for round in range(self.most):
            h = self.cell(seen, h)
            p = torch.sigmoid(self.halt(h) + 0.5 * x[:, :1])
            stop = (left - p * left < 0.05).float() if round < self.most - 1 else torch.ones_like(left)
            share = left * (stop + (1 - stop) * p)
            out, cost = out + share * h, cost + share * (round + 1)
            left = left - share
            if not bool((left > 0).any()):
                break
        return self.answer(out), cost.squeeze(1)


torch.manual_seed(97)
model = Thinker()
optimizer = torch.optim.Adam(model.parameters(), lr=3e-3, eps=1e-4)
for step in range(1, 5):
    x = torch.randn(10, 5, generator=torch.Generator().manual_seed(step))
    x[:, 0] = x[:, 0].abs().mul(4) * torch.tensor([1.0] * 5 + [-1.0] * 5)
    y = torch.stack([x[:, 1] * x[:, 2], x[:, 3].abs()], 1)
    mine = slice(10 * rank // world, 10 * (rank + 1) // world)
    guess, cost = model(x[mine])
    loss = (nn.functional.mse_loss(guess, y[mine], reduction="sum") / 2 + 0.01 * cost.sum()) / 10
    optimizer.zero_grad()
    loss.backward()
    shown = loss.detach()
    if world > 1:
        for p in model.parameters():
            dist.all_reduce(p.grad)
        dist.all_reduce(shown)
    optimizer.step()
    if rank == 0:
        print(f"step {step} loss {shown.item():.7f}", flush=True)
if "--save" in sys.argv:
    torch.save(model.state_dict(), os.path.join(sys.argv[sys.argv.index("--save") + 1], f"rank{rank}.pt"))
if not ONE:
    dist.destroy_process_group()
