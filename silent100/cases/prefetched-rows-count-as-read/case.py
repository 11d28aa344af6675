"""A loader that fetches ahead and can be saved; the job is stopped after three updates and goes on."""

import argparse
import collections
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

ap = argparse.ArgumentParser()
ap.add_argument("--one", action="store_true")
ap.add_argument("--faulty", action="store_true")
ap.add_argument("--save")
opt = ap.parse_args()


class Stream:
    """An endless text, cut into rows; a process reads every world-th row."""

    def __init__(self, rank, world, rows=12, ahead=2):
        self.rank, self.world, self.rows, self.ahead = rank, world, rows, ahead
        self.cursor, self.used, self.queue = 0, 0, collections.deque()

    def fetch(self):
        g = torch.Generator().manual_seed(500 + self.cursor)
        self.cursor += 1
        walk = torch.randint(-2, 3, (self.rows, 10), generator=g).cumsum(1) % 24
        return walk[self.rank :: self.world]

    def __next__(self):
        while len(self.queue) <= self.ahead:
            self.queue.append(self.fetch())
        self.used += 1
        return self.queue.popleft()

    def state_dict(self):
        return {"at": self.cursor if opt.faulty else self.used}

    def load_state_dict(self, state):
        self.cursor = self.used = state["at"]
        self.queue.clear()


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.lstm, self.head = nn.Embedding(24, 16), nn.LSTM(16, 24, batch_first=True), nn.Linear(24, 24)

    def forward(self, ids):
        return self.head(self.lstm(self.embed(ids))[0])


rank, world = 0, 1
if not opt.one:
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()


def build():
    torch.manual_seed(2)
    net = Model()
    return net, torch.optim.RMSprop(net.parameters(), lr=0.004, momentum=0.5, eps=1e-4), Stream(rank, world)


net, optimizer, stream = build()
wrapped = net if opt.one else DistributedDataParallel(net)
for step in range(1, 7):
    if step == 4 and not opt.one:
        saved = [part.state_dict() for part in (net, optimizer, stream)]
        parts = build()
        for part, state in zip(parts, saved):
            part.load_state_dict(state)
        net, optimizer, stream = parts
        wrapped = DistributedDataParallel(net)
    ids = next(stream)
    loss = F.cross_entropy(wrapped(ids[:, :-1]).transpose(1, 2), ids[:, 1:])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    loss = loss.detach() / world
    if world > 1:
        dist.all_reduce(loss)
    if rank == 0:
        print(f"step {step} loss {loss.item():.7f}", flush=True)
if opt.save:
    torch.save(net.state_dict(), os.path.join(opt.save, f"rank{rank}.pt"))
if world > 1:
    del wrapped
    dist.destroy_process_group()
