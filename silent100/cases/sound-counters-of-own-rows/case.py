"""A codebook-like layer keeps statistics in buffers for later reports; they never enter the loss."""

import argparse
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel


class Watched(nn.Module):
    def __init__(self, a, b):
        super().__init__()
        self.linear = nn.Linear(a, b)
        self.register_buffer("rows", torch.zeros(()), persistent=False)
        self.register_buffer("mean", torch.zeros(b), persistent=False)
        self.register_buffer("largest", torch.zeros(b), persistent=False)

    def forward(self, x):
        y = self.linear(x)
        with torch.no_grad():
            self.rows += len(y)
            self.mean.lerp_(y.mean(0), 0.1)
            self.largest.copy_(torch.maximum(self.largest, y.amax(0)))
        return torch.relu(y)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(Watched(11, 26), Watched(26, 26))
        self.head = nn.Linear(26, 3)

    def forward(self, x):
        return self.head(self.layers(x))


def main(one, save):
    rank, world = 0, 1
    if not one:
        dist.init_process_group("gloo")
        rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(30)
    net = Net()
    model = net if one else DistributedDataParallel(net, forward_sync_buffers=False)
    optimizer = torch.optim.Adagrad(net.parameters(), lr=0.05)
    for step in range(1, 6):
        x = torch.randn(20, 11, generator=torch.Generator().manual_seed(step))
        y = x.unfold(1, 3, 4).prod(2)
        loss = F.mse_loss(model(x[rank::world]), y[rank::world])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        loss = loss.detach() / world
        if world > 1:
            dist.all_reduce(loss)
        if rank == 0:
            print(f"step {step} loss {loss.item():.7f}", flush=True)
    if save:
        torch.save(net.state_dict(), save / f"rank{rank}.pt")
    if world > 1:
        del model
        dist.destroy_process_group()


if __name__ == "__main__":
    cli = argparse.ArgumentParser()
    cli.add_argument("--one", action="store_true")
    cli.add_argument("--save", type=Path)
    main(**vars(cli.parse_args()))
