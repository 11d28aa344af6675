"""Classify synthetic spectra with a DataLoader and DDP."""

import argparse
import os

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler

BATCH = 16


class Spectra(Dataset):
    def __init__(self, n=96):
        g = torch.Generator().manual_seed(2024)
        self.x = torch.randn(n, 1, 40, generator=g)
        self.y = (self.x.sum((1, 2)) > 0).long() + 2 * (self.x[:, 0, 0] > 0).long()

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        return self.x[i], self.y[i]


def conv_net():
    return nn.Sequential(
        nn.Conv1d(1, 16, 5, stride=2),
        nn.GroupNorm(4, 16),
        nn.ReLU(),
        nn.Conv1d(16, 32, 5, stride=2),
        nn.GroupNorm(4, 32),
        nn.ReLU(),
        nn.AdaptiveAvgPool1d(1),
        nn.Flatten(),
        nn.Linear(32, 4),
    )


def loader(args, rank, world):
    data = Spectra()
    if args.one:
        return DataLoader(data, BATCH, shuffle=False)
    if args.faulty:
        return DataLoader(data, BATCH // world, shuffle=False)
    return DataLoader(data, BATCH // world, sampler=DistributedSampler(data, world, rank, shuffle=False))


def main():
    cli = argparse.ArgumentParser()
    cli.add_argument("--one", action="store_true")
    cli.add_argument("--faulty", action="store_true")
    cli.add_argument("--save")
    args = cli.parse_args()
    if not args.one:
        dist.init_process_group("gloo")
    rank, world = (0, 1) if args.one else (dist.get_rank(), dist.get_world_size())
    torch.manual_seed(0)
    net = conv_net()
    model = net if args.one else DistributedDataParallel(net)
    opt = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    for step, (x, y) in enumerate(loader(args, rank, world), 1):
        if step > 4:
            break
        opt.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        opt.step()
        mean = loss.detach()
        if not args.one:
            dist.all_reduce(mean)
            mean /= world
        if rank == 0:
            print(f"step {step} loss {mean:.7f}", flush=True)
    if args.save:
        torch.save(net.state_dict(), os.path.join(args.save, f"rank{rank}.pt"))
    if not args.one:
        del model  # before its process group
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
