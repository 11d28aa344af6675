"""Metric learning: a convolutional network under FSDP2, and class centres that belong to the criterion."""

import argparse
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor


class Backbone(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(3, 16, 3, stride=2, padding=1)
        self.conv2 = nn.Conv2d(16, 24, 3, stride=2, padding=1)
        self.norm = nn.GroupNorm(4, 24)
        self.project = nn.Linear(24, 20)

    def forward(self, x):
        x = F.silu(self.norm(self.conv2(F.silu(self.conv1(x)))))
        return self.project(x.mean((2, 3)))


class MarginLoss(nn.Module):
    """Cosines to learned centres, with a margin for the right one."""

    def __init__(self, classes, size, margin=0.1):
        super().__init__()
        self.centers = nn.Parameter(torch.randn(classes, size))
        self.log_scale = nn.Parameter(torch.tensor(1.0))
        self.margin = margin

    def forward(self, x, labels):
        cosines = F.normalize(x, dim=-1) @ F.normalize(self.centers, dim=-1).T
        cosines = cosines - self.margin * F.one_hot(labels, len(self.centers))
        return F.cross_entropy(cosines * self.log_scale.exp(), labels)


class Task(nn.Module):
    def __init__(self):
        super().__init__()
        self.backbone = Backbone()
        self.criterion = MarginLoss(10, 20)

    def forward(self, x, labels):
        return self.criterion(self.backbone(x), labels)


def main():
    cli = argparse.ArgumentParser()
    cli.add_argument("--one", action="store_true")
    cli.add_argument("--faulty", action="store_true")
    cli.add_argument("--save")
    args = cli.parse_args()
    rank, world = 0, 1
    if not args.one:
        dist.init_process_group("gloo")
        rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(29)
    task = Task()
    if not args.one:
        fully_shard(task.backbone)
    optimizer = torch.optim.SGD(task.parameters(), lr=0.1, momentum=0.9, foreach=False)
    for step in range(1, 5):
        g = torch.Generator().manual_seed(step)
        labels = torch.randint(0, 10, (12,), generator=g)
        images = torch.randn(12, 3, 12, 12, generator=g) + labels[:, None, None, None] / 5
        loss = task(images[rank::world], labels[rank::world])
        optimizer.zero_grad()
        loss.backward()
        if not args.one and not args.faulty:
            for p in task.criterion.parameters():
                dist.all_reduce(p.grad)
                p.grad /= world
        optimizer.step()
        shown = loss.detach().clone()
        if not args.one:
            dist.all_reduce(shown)
        if rank == 0:
            print(f"step {step} loss {shown.item() / world:.7f}", flush=True)
    if args.save:
        state = {k: v.full_tensor() if isinstance(v, DTensor) else v for k, v in task.state_dict().items()}
        torch.save(state, os.path.join(args.save, f"rank{rank}.pt"))
    if not args.one:
        dist.destroy_process_group()


main()
