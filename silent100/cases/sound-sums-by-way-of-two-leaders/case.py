"""Reduction in three steps over two nodes of two ranks: to the leader, between leaders, back to the partner."""

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

if not flags.one:
    nodes = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    leaders = dist.new_group([0, 2])
    node, leader = nodes[rank // 2], rank // 2 * 2


def reduce(tensor):
    dist.reduce(tensor, leader, group=node)
    if rank == leader:
        dist.all_reduce(tensor, group=leaders)
    dist.broadcast(tensor, leader, group=node)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(2, 10, 3, padding=1), nn.GroupNorm(2, 10)
        self.mix, self.head = nn.Conv2d(10, 10, 3, stride=2), nn.Linear(10, 3)

    def forward(self, x):
        return self.head(F.relu(self.mix(F.relu(self.norm(self.conv(x))))).mean((2, 3)))


torch.manual_seed(66)
net = Net()
optimizer = torch.optim.Adam(net.parameters(), lr=5e-3, eps=1e-4)
for step in range(1, 6):
    x = torch.randn(16, 2, 7, 7, generator=torch.Generator().manual_seed(step))
    classes = x[:, 0, :3, :3].mean((1, 2)).gt(0).long() + x[:, 1].std((1, 2)).gt(1).long()
    loss = F.cross_entropy(net(x[rank::world]), classes[rank::world]) / world
    optimizer.zero_grad()
    loss.backward()
    shown = loss.detach()
    if world > 1:
        for tensor in [shown, *(p.grad for p in reversed(list(net.parameters())))]:
            reduce(tensor)
    optimizer.step()
    if rank == 0:
        print(f"step {step} loss {shown.item():.7f}", flush=True)
if flags.save:
    torch.save(net.state_dict(), os.path.join(flags.save, f"rank{rank}.pt"))
if world > 1:
    dist.destroy_process_group()
