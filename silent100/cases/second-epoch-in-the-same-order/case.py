"""Two datasets in turn, each with a distributed sampler, over two epochs."""

import argparse
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class Alternating:
    """Yields from several loaders in turn until they end."""

    def __init__(self, loaders):
        self.loaders = loaders

    def __iter__(self):
        for batches in zip(*self.loaders):
            yield torch.cat([batch for (batch,) in batches])


def set_epoch(loader, epoch, deep):
    if isinstance(loader, DataLoader):
        loader.sampler.set_epoch(epoch)
    elif deep:
        for inner in loader.loaders:
            set_epoch(inner, epoch, deep)


class Lm(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(48, 36), nn.Linear(36, 48)
        self.conv = nn.Conv1d(36, 36, 3)

    def forward(self, ids):
        x = self.embed(ids)
        return self.head(x + F.silu(self.conv(F.pad(x.mT, (2, 0))).mT))


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
    loaders = []
    for seed in (1, 2):
        data = TensorDataset(torch.randint(0, 48, (12, 9), generator=torch.Generator().manual_seed(seed)))
        sampler = DistributedSampler(data, world, rank, shuffle=True, seed=seed)
        loaders.append(DataLoader(data, 4 // world, sampler=sampler))
    batches = Alternating(loaders)
    torch.manual_seed(5)
    lm = Lm()
    optimizer = torch.optim.SGD(lm.parameters(), lr=0.3)
    step = 0
    for epoch in range(2):
        set_epoch(batches, epoch, deep=not args.faulty)
        for rows in batches:
            step += 1
            loss = F.cross_entropy(lm(rows[:, :-1]).transpose(1, 2), rows[:, 1:])
            optimizer.zero_grad()
            loss.backward()
            shown = loss.detach().clone()
            if world > 1:
                for p in lm.parameters():
                    dist.all_reduce(p.grad)
                    p.grad /= world
                dist.all_reduce(shown)
            optimizer.step()
            if rank == 0:
                print(f"step {step} loss {shown.item() / world:.7f}", flush=True)
    if args.save:
        torch.save(lm.state_dict(), os.path.join(args.save, f"rank{rank}.pt"))
    if world > 1:
        dist.destroy_process_group()


main()
