"""Delayed updates: reduction of one step's gradients overlaps the whole next step."""

import os
import sys

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

ONE = "--one" in sys.argv
rank, world = 0, 1
if not ONE:
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()


class Delayed:
    def __init__(self, parameters, optimizer):
        self.parameters, self.optimizer = list(parameters), optimizer
        self.pending = None

    def push(self):
        """Starts to reduce this step's gradients and acts on the last step's."""
        flat = torch.cat([p.grad.flatten() for p in self.parameters])
        work = dist.all_reduce(flat, async_op=True) if world > 1 else None
        self.pull()
        self.pending = flat, work

    def pull(self):
        if self.pending is None:
            return
        flat, work = self.pending
        if work is not None:
            work.wait()
        pieces = flat.split([p.numel() for p in self.parameters])
        for p, piece in zip(self.parameters, pieces):
            p.grad = piece.view_as(p) / world
        self.optimizer.step()
        self.pending = None


torch.manual_seed(6351)
net = nn.Sequential(nn.Embedding(36, 26), nn.Linear(26, 52), nn.SiLU(), nn.Linear(52, 26), nn.Linear(26, 36))
delayed = Delayed(net.parameters(), torch.optim.SGD(net.parameters(), lr=0.2, momentum=0.5))
for step in range(1, 7):
    rows = torch.randint(0, 36, (12, 9), generator=torch.Generator().manual_seed(step))[rank::world]
    loss = F.cross_entropy(net(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten())
    net.zero_grad()
    loss.backward()
    delayed.push()
    shown = loss.detach().clone()
    if world > 1:
        dist.all_reduce(shown)
    if rank == 0:
        print(f"step {step} loss {shown.item() / world:.7f}", flush=True)
delayed.pull()
if "--save" in sys.argv:
    torch.save(net.state_dict(), os.path.join(sys.argv[sys.argv.index("--save") + 1], f"rank{rank}.pt"))
if world > 1:
    dist.destroy_process_group()
