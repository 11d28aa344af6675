"""Ranks hold halves of every activation, of every norm's weights and of every matrix's inputs."""

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

WIDTH = 24


class Total(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        x = x.contiguous().clone()
        if world > 1:
            dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx, g):
        return Total.forward(None, g)


class Norm(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter((1 + 0.1 * torch.randn(WIDTH)).chunk(world)[rank].clone())

    def forward(self, x):
        squares = Total.apply(x.square().sum(-1, keepdim=True))
        return x * (squares / WIDTH + 1e-6).rsqrt() * self.weight


class Mix(nn.Module):
    """Takes its rank's inputs, gives its rank's outputs."""

    def __init__(self, outputs):
        super().__init__()
        self.weight = nn.Parameter((torch.randn(outputs, WIDTH) / 5).chunk(world, 1)[rank].clone())

    def forward(self, x):
        return Total.apply(x @ self.weight.T).chunk(world, -1)[rank]


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.norms, self.mixes = nn.ModuleList(Norm() for _ in range(3)), nn.ModuleList(Mix(WIDTH) for _ in range(3))
        self.head = nn.Parameter((torch.randn(4, WIDTH) / 5).chunk(world, 1)[rank].clone())

    def forward(self, x):
        x = x.chunk(world, -1)[rank]
        for norm, mix in zip(self.norms, self.mixes):
            x = x + torch.tanh(mix(norm(x)))
        return Total.apply(x @ self.head.T)


torch.manual_seed(94)
net = Net()
optimizer = torch.optim.SGD(net.parameters(), lr=0.2, momentum=0.9)
for step in range(1, 6):
    x = torch.randn(16, WIDTH, generator=torch.Generator().manual_seed(step))
    loss = F.cross_entropy(net(x), (x[:, :4] * x[:, 12:16]).argmax(1))
    optimizer.zero_grad()
    (loss / world).backward()  # the last sum counts the loss once per rank
    optimizer.step()
    if rank == 0:
        print(f"step {step} loss {loss.item():.7f}", flush=True)
if flags.save:
    torch.save(
        {n: (p.detach(), p.ndim - 1, rank, world) for n, p in net.named_parameters()},
        os.path.join(flags.save, f"rank{rank}.pt"),
    )
if world > 1:
    dist.destroy_process_group()
