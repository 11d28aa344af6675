import argparse
import os

import torch
import torch.distributed as dist
from torch import nn


class GlobalSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        x = x.clone()
        dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx, grad):
        grad = grad.clone()
        dist.all_reduce(grad)
        return grad


class SyncNorm(nn.BatchNorm2d):
    """Batch norm whose statistics cover every rank."""

    def forward(self, x):
        if not self.training:
            return super().forward(x)
        count = dist.get_world_size() * x.numel() / x.shape[1]
        sums = torch.stack([x.sum((0, 2, 3)), x.square().sum((0, 2, 3))])
        mean, square = GlobalSum.apply(sums) / count
        var = square - mean.square()
        with torch.no_grad():
            self.running_mean.lerp_(mean, self.momentum)
            self.running_var.lerp_(var * count / (count - 1), self.momentum)
            self.num_batches_tracked += 1
        x = (x - mean[:, None, None]) * torch.rsqrt(var + self.eps)[:, None, None]
        return x * self.weight[:, None, None] + self.bias[:, None, None]


def network(norm):
    torch.manual_seed(2718)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, bias=False), norm(8), nn.ReLU(), nn.Conv2d(8, 16, 3, stride=2, bias=False), norm(16),
        nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 4),
    )  # fmt: skip


def train(args):
    rank, world = 0, 1
    if not args.one:
        dist.init_process_group("gloo")
        rank, world = dist.get_rank(), dist.get_world_size()
    net = network(nn.BatchNorm2d if args.one else SyncNorm)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    for step in range(1, 6):
        g = torch.Generator().manual_seed(step)
        images, labels = torch.randn(12, 3, 10, 10, generator=g), torch.randint(0, 4, (12,), generator=g)
        images, labels = images.chunk(world)[rank], labels.chunk(world)[rank]
        loss = nn.functional.cross_entropy(net(images), labels)
        optimizer.zero_grad()
        loss.backward()
        loss = loss.detach()
        if world > 1:
            for p in net.parameters():
                dist.all_reduce(p.grad)
                p.grad /= world
            dist.all_reduce(loss)
        optimizer.step()
        if rank == 0:
            print(f"step {step} loss {loss.item() / world:.7f}", flush=True)
    if args.save:
        torch.save(net.state_dict(), os.path.join(args.save, f"rank{rank}.pt"))
    if world > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--one", action="store_true")
    parser.add_argument("--save")
    train(parser.parse_args())
