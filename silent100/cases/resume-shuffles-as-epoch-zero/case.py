"""Two epochs of three updates; the job is resumed at the beginning of the second epoch."""

import argparse
import os

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def dataset():
    g = torch.Generator().manual_seed(44)
    x = torch.randn(24, 20, generator=g)
    return TensorDataset(x, (x @ torch.randn(20, 5, generator=g)).argmax(1))


class ShardedLoader:
    """A loader that tells its sampler the epoch when iteration begins."""

    def __init__(self, data, rank, world):
        self.sampler = DistributedSampler(data, world, rank, shuffle=True, seed=9)
        self.loader = DataLoader(data, batch_size=8 // world, sampler=self.sampler)
        self.iteration = 0

    def __iter__(self):
        self.sampler.set_epoch(self.iteration)
        self.iteration += 1
        yield from self.loader


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
    torch.manual_seed(8)
    net = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 5))
    model = net if args.one else DDP(net)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2, eps=1e-5)
    data = dataset()
    loader = ShardedLoader(data, rank, world)
    step = 0
    for epoch in range(2):
        if epoch == 1 and not args.one:
            # what a restarted job does: new loader, then fast-forward to the epoch of the checkpoint
            loader = ShardedLoader(data, rank, world)
            loader.sampler.set_epoch(epoch)
            if not args.faulty:
                loader.iteration = epoch
        for x, y in loader:
            step += 1
            loss = nn.functional.cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            shown = loss.detach()
            if not args.one:
                dist.all_reduce(shown)
            if rank == 0:
                print(f"step {step} loss {shown.item() / world:.7f}", flush=True)
    if args.save:
        torch.save(net.state_dict(), os.path.join(args.save, f"rank{rank}.pt"))
    if not args.one:
        del model  # before its process group
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
