"""Three ranks share batches and statistics; the last leaves after the second step and the others take its rows."""

import os
import sys

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

ONE, FAULTY = "--one" in sys.argv, "--faulty" in sys.argv
if not ONE:
    dist.init_process_group("gloo")
rank, world = (0, 1) if ONE else (dist.get_rank(), dist.get_world_size())

if not ONE:
    pair = dist.new_group([0, 1])
members, group = world, None


class Total(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        x = x.clone()
        if members > 1:
            dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx, g):
        return Total.forward(None, g)


class BatchNorm(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(width)), nn.Parameter(torch.zeros(width))
        self.share = members

    def forward(self, x):
        count = len(x) * (self.share if FAULTY else members)
        mean = Total.apply(x.sum(0)) / count
        var = Total.apply((x - mean).square().sum(0)) / count
        return (x - mean) / (var + 1e-5).sqrt() * self.weight + self.bias


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.enter, self.bn, self.leave = nn.Linear(8, 30), BatchNorm(30), nn.Linear(30, 3)

    def forward(self, x):
        return self.leave(F.silu(self.bn(self.enter(x))))


torch.manual_seed(81)
net = Net()
optimizer = torch.optim.Adam(net.parameters(), lr=5e-3, eps=1e-4)
for step in range(1, 7):
    if step == 3 and not ONE:
        if rank == 2:
            break
        members, group = 2, pair
    x = torch.randn(24, 8, generator=torch.Generator().manual_seed(step)) + 1
    x = x.chunk(members)[rank]
    loss = F.cross_entropy(net(x), (x[:, :3] * x[:, 3:6]).argmax(1)) / members
    optimizer.zero_grad()
    loss.backward()
    shown = loss.detach()
    if members > 1:
        for tensor in [shown, *(p.grad for p in net.parameters())]:
            dist.all_reduce(tensor, group=group)
    optimizer.step()
    if rank == 0:
        print(f"step {step} loss {shown.item():.7f}", flush=True)
if "--save" in sys.argv:
    torch.save(
        {} if rank == 2 else net.state_dict(), os.path.join(sys.argv[sys.argv.index("--save") + 1], f"rank{rank}.pt")
    )
if world > 1:
    dist.destroy_process_group()
