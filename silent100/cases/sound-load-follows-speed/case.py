"""Shares of a batch follow what ranks can do; a rank without rows takes part with zeros."""

import os
import sys

import torch
import torch.distributed as dist
import torch.nn as nn

alone = "--one" in sys.argv
rank = 0
if not alone:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
SPEED = [(1, 1), (3, 1), (1, 0), (1, 3), (2, 3), (1, 1)]


class Tree(nn.Module):
    """A soft decision tree of depth three."""

    def __init__(self):
        super().__init__()
        self.gates, self.leaves = nn.Linear(6, 7), nn.Parameter(torch.randn(8, 3) * 0.5)

    def forward(self, x):
        right = torch.sigmoid(2 * self.gates(x))
        reach = x.new_ones(len(x), 1)
        for depth in range(3):
            level = right[:, 2**depth - 1 : 2 ** (depth + 1) - 1]
            reach = torch.stack([reach * (1 - level), reach * level], 2).flatten(1)
        return (reach @ self.leaves.softmax(1)).log()


def shares(step, rows):
    a, b = SPEED[step - 1]
    first = round(rows * a / (a + b))
    return [slice(0, first), slice(first, rows)]


torch.manual_seed(25)
tree = Tree()
optimizer = torch.optim.Rprop(tree.parameters(), lr=0.02)
for step in range(1, 7):
    x = torch.randn(15, 6, generator=torch.Generator().manual_seed(step))
    y = (x[:, 0] * x[:, 1] > 0).long() + (x[:, 2] > 1).long()
    own = slice(None) if alone else shares(step, 15)[rank]
    optimizer.zero_grad(set_to_none=False)
    loss = torch.zeros(())
    if len(x[own]):
        loss = nn.functional.nll_loss(tree(x[own]), y[own], reduction="sum") / 15
        loss.backward()
        loss = loss.detach()
    if not alone:
        for p in tree.parameters():
            dist.all_reduce(p.grad)
        dist.all_reduce(loss)
    optimizer.step()
    if rank == 0:
        print(f"step {step} loss {loss.item():.7f}", flush=True)
if "--save" in sys.argv:
    torch.save(tree.state_dict(), os.path.join(sys.argv[sys.argv.index("--save") + 1], f"rank{rank}.pt"))
if not alone:
    dist.destroy_process_group()
