# Preempted in the middle of an epoch. The loader counts what it has yielded.
import argparse
import os

import torch
import torch.distributed as dist
from torch import nn


class Loader:
    """Batches of a permuted dataset for one rank; knows its position."""

    def __init__(self, data, batch, rank, world):
        self.data, self.batch, self.rank, self.world = data, batch, rank, world
        self.order = torch.randperm(len(data), generator=torch.Generator().manual_seed(0))
        self.yielded = 0

    def __iter__(self):
        while (self.yielded + 1) * self.batch <= len(self.order):
            rows = self.order[self.yielded * self.batch : (self.yielded + 1) * self.batch]
            self.yielded += 1
            yield self.data[rows[self.rank :: self.world]]

    def state_dict(self):
        return {"yielded": self.yielded}

    def load_state_dict(self, state):
        self.yielded = state["yielded"]


class Autoregressive(nn.Module):
    def __init__(self):
        super().__init__()
        self.cell = nn.LSTM(3, 40, num_layers=2, batch_first=True)
        self.mean = nn.Linear(40, 3)

    def forward(self, series):
        return self.mean(self.cell(series)[0])


def average(model, world):
    for p in model.parameters():
        dist.all_reduce(p.grad)
        p.grad /= world


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
    data = torch.randn(64, 10, 3, generator=torch.Generator().manual_seed(1)).cumsum(1)
    loader = Loader(data, 8, rank, world)
    torch.manual_seed(2)
    model = Autoregressive()
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3, eps=1e-5)
    step, segments = 0, [5] if args.one else [2, 3]
    checkpoint = None
    for updates in segments:
        if checkpoint is not None:  # a new job
            loader = Loader(data, 8, rank, world)
            model.load_state_dict(checkpoint["model"])
            optimizer.load_state_dict(checkpoint["optimizer"])
            if not args.faulty:
                loader.load_state_dict(checkpoint["loader"])
        for _, series in zip(range(updates), loader):
            step += 1
            loss = nn.functional.mse_loss(model(series[:, :-1]), series[:, 1:])
            optimizer.zero_grad()
            loss.backward()
            shown = loss.detach().clone()
            if world > 1:
                average(model, world)
                dist.all_reduce(shown)
            optimizer.step()
            if rank == 0:
                print(f"step {step} loss {shown.item() / world:.7f}", flush=True)
        checkpoint = {
            "model": {k: v.clone() for k, v in model.state_dict().items()},
            "optimizer": optimizer.state_dict(),
            "loader": loader.state_dict(),
        }
    if args.save:
        torch.save(model.state_dict(), os.path.join(args.save, f"rank{rank}.pt"))
    if world > 1:
        dist.destroy_process_group()


main()
