"""An endless stream of made-up sounds, read by two workers on each rank."""

import os
import sys

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

ONE, FAULTY = "--one" in sys.argv, "--faulty" in sys.argv


class Sounds(IterableDataset):
    """Yields batches of this rank; worker w of n has every n-th of them."""

    def __init__(self, rank, world, size=16):
        self.rank, self.world, self.size = rank, world, size

    def __iter__(self):
        info = get_worker_info()
        number, stride = (info.id, info.num_workers) if info and not FAULTY else (0, 1)
        while True:
            g = torch.Generator().manual_seed(number)
            x, y = torch.randn(self.size, 1, 40, generator=g), torch.randint(0, 3, (self.size,), generator=g)
            yield x[self.rank :: self.world], y[self.rank :: self.world]
            number += stride


class Spotter(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.gru = nn.Conv1d(1, 12, 5, stride=2), nn.GRU(12, 16, batch_first=True)
        self.out = nn.Linear(16, 3)

    def forward(self, x):
        x = torch.relu(self.conv(x)).transpose(1, 2)
        return self.out(self.gru(x)[0][:, -1])


def main():
    rank, world = 0, 1
    if not ONE:
        dist.init_process_group("gloo")
        rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(202)
    net = Spotter()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.3)
    loader = iter(DataLoader(Sounds(rank, world), batch_size=None, num_workers=0 if ONE else 2))
    for step in range(1, 6):
        x, y = next(loader)
        loss = nn.functional.cross_entropy(net(x), y)
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
    del loader
    if "--save" in sys.argv:
        torch.save(net.state_dict(), os.path.join(sys.argv[sys.argv.index("--save") + 1], f"rank{rank}.pt"))
    if world > 1:
        dist.destroy_process_group()


main()
