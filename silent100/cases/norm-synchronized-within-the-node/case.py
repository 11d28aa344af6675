"""Convolutions with a batch norm over ranks, written by hand with a collective that has a gradient."""

import argparse
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F


class SumOver(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        ctx.group, x = group, x.clone()
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx, grad):
        grad = grad.contiguous().clone()
        dist.all_reduce(grad, group=ctx.group)
        return grad, None


class BatchNorm(nn.Module):
    def __init__(self, n, group):
        super().__init__()
        self.group, self.scale, self.shift = group, nn.Parameter(torch.ones(n)), nn.Parameter(torch.zeros(n))

    def forward(self, x):
        sums = torch.stack([x.sum((0, 2, 3)), x.square().sum((0, 2, 3)), torch.full_like(self.scale, x[:, 0].numel())])
        if self.group is not None:
            sums = SumOver.apply(sums, self.group)
        mean = sums[0] / sums[2]
        var = sums[1] / sums[2] - mean.square()
        x = (x - mean[:, None, None]) / (var + 1e-3).sqrt()[:, None, None]
        return x * self.scale[:, None, None] + self.shift[:, None, None]


def main():
    cli = argparse.ArgumentParser()
    cli.add_argument("--one", action="store_true")
    cli.add_argument("--faulty", action="store_true")
    cli.add_argument("--save")
    args = cli.parse_args()
    rank, world, group = 0, 1, None
    if not args.one:
        dist.init_process_group("gloo")
        rank, world = dist.get_rank(), dist.get_world_size()
        nodes = [dist.new_group([0, 1]), dist.new_group([2, 3])]
        group = nodes[rank // 2] if args.faulty else dist.group.WORLD
    torch.manual_seed(52)
    layers = []
    for a, b in ((2, 8), (8, 12)):
        layers += [nn.Conv2d(a, b, 3, 2, 1, bias=False), BatchNorm(b, group), nn.ReLU()]
    net = nn.Sequential(*layers, nn.Flatten(), nn.Linear(48, 3))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
    for step in range(1, 5):
        g = torch.Generator().manual_seed(step)
        x = torch.randn(16, 2, 8, 8, generator=g) * torch.linspace(0.6, 1.4, 16)[:, None, None, None]
        y = torch.randint(3, (16,), generator=g)
        each = 16 // world
        mine = slice(rank * each, (rank + 1) * each)
        loss = F.cross_entropy(net(x[mine]), y[mine], reduction="sum") / 16
        optimizer.zero_grad()
        loss.backward()
        shown = loss.detach().clone()
        if world > 1:
            for p in net.parameters():
                dist.all_reduce(p.grad)
            dist.all_reduce(shown)
        optimizer.step()
        if rank == 0:
            print(f"step {step} loss {shown.item():.7f}", flush=True)
    if args.save:
        torch.save(net.state_dict(), os.path.join(args.save, f"rank{rank}.pt"))
    if world > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
