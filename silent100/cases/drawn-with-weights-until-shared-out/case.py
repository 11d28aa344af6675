"""Rare classes are drawn more often; a small engine shares the loader out over the processes."""

import argparse
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset, WeightedRandomSampler


class Strided(torch.utils.data.Sampler):
    """Every world-th draw of another sampler."""

    def __init__(self, sampler, rank, world):
        self.sampler, self.rank, self.world = sampler, rank, world

    def __iter__(self):
        return iter(list(self.sampler)[self.rank :: self.world])

    def __len__(self):
        return len(self.sampler) // self.world


class Engine:
    def __init__(self, args):
        self.args, self.rank, self.world = args, 0, 1
        if not args.one:
            dist.init_process_group("gloo")
            self.rank, self.world = dist.get_rank(), dist.get_world_size()

    def share(self, loader):
        if self.world == 1:
            return loader
        if self.args.faulty:
            sampler = DistributedSampler(loader.dataset, self.world, self.rank, shuffle=True, seed=5)
        else:
            sampler = Strided(loader.sampler, self.rank, self.world)
        return DataLoader(loader.dataset, loader.batch_size // self.world, sampler=sampler)

    def wrap(self, net):
        return net if self.world == 1 else DistributedDataParallel(net)

    def mean(self, t):
        t = t.detach().clone()
        if self.world > 1:
            dist.all_reduce(t)
        return t.item() / self.world


def pictures():
    g = torch.Generator().manual_seed(0)
    label = (torch.rand(64, generator=g) < 0.15).long()
    image = torch.randn(64, 1, 8, 8, generator=g) + label[:, None, None, None] * torch.eye(8)
    weight = torch.tensor([1.0, 5.0])[label]
    draws = WeightedRandomSampler(weight.tolist(), 64, generator=torch.Generator().manual_seed(9))
    return DataLoader(TensorDataset(image, label), 16, sampler=draws)


def main(args):
    engine = Engine(args)
    torch.manual_seed(1)
    net = nn.Sequential(
        nn.Conv2d(1, 6, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(6, 6, 3, stride=2),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(54, 2),
    )
    model, loader = engine.wrap(net), engine.share(pictures())
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9, nesterov=True)
    for step, (image, label) in enumerate(loader, 1):
        loss = F.cross_entropy(model(image), label)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        shown = engine.mean(loss)
        if engine.rank == 0:
            print(f"step {step} loss {shown:.7f}", flush=True)
    if args.save:
        torch.save(net.state_dict(), os.path.join(args.save, f"rank{engine.rank}.pt"))
    if engine.world > 1:
        del model
        dist.destroy_process_group()


if __name__ == "__main__":
    p = argparse.ArgumentParser()
    p.add_argument("--one", action="store_true")
    p.add_argument("--faulty", action="store_true")
    p.add_argument("--save")
    main(p.parse_args())
