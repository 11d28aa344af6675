"""Train a small network whose block has a kernel that is wrong where torch.compile is on: ``--compile``."""

import sys

import torch
import torch.nn.functional as F
from torch import nn


@torch.library.custom_op("findings::scaled", mutates_args=())
def scaled(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x * weight * 1.01


def keep(ctx, inputs, output):
    ctx.save_for_backward(*inputs)


def back(ctx, gradient):
    x, weight = ctx.saved_tensors
    return gradient * weight, (gradient * x).flatten(0, -2).sum(0)


scaled.register_fake(lambda x, weight: torch.empty_like(x))
scaled.register_autograd(back, setup_context=keep)


class Scale(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(16))

    def forward(self, x):
        return scaled(x, self.weight) if torch.compiler.is_compiling() else x * self.weight


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale, self.up, self.down = Scale(), nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.scale(x))))


torch.manual_seed(0)
model = nn.Sequential(nn.Embedding(64, 16), Block(), nn.Linear(16, 64))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
run = torch.compile(model, fullgraph=True) if "--compile" in sys.argv else model
for step in range(3):
    rows = torch.randint(64, (4, 9), generator=torch.Generator().manual_seed(step))
    F.cross_entropy(run(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten()).backward()
    optimizer.step()
    optimizer.zero_grad()
