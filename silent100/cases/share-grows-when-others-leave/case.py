"""The batch stays as large when processes leave: the others take more microbatches each."""

import os
import sys
from functools import partial

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

ONE, FAULTY = "--one" in sys.argv, "--faulty" in sys.argv
MICROBATCHES, LEAVE_BEFORE = 4, 4


class Seq(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(28, 14)
        self.gru = nn.GRU(14, 22, num_layers=2, batch_first=True)
        self.out = nn.Linear(22, 28)

    def forward(self, ids):
        return self.out(self.gru(self.embed(ids))[0])


class Crew:
    """Who is there, and which microbatches are whose."""

    def __init__(self, rank, world):
        self.rank, self.world, self.group = rank, world, None
        self.half = dist.new_group([0, 1]) if world > 1 else None

    def shrink(self):
        self.world, self.group = 2, self.half

    def own(self):
        return range(self.rank, MICROBATCHES, self.world)

    def mean(self, t):
        if self.world > 1:
            dist.all_reduce(t, group=self.group)
            t /= self.world


def loss_of(net, rows, parts):
    return F.cross_entropy(net(rows[:, :-1]).transpose(1, 2), rows[:, 1:]) / parts


def microbatch(step, number):
    ids = torch.randint(0, 28, (4, 11), generator=torch.Generator().manual_seed(10 * step + number))
    return torch.where(torch.arange(11) % 2 == 1, ids.roll(1, 1) + 1, ids) % 28


def main():
    rank, world = 0, 1
    if not ONE:
        dist.init_process_group("gloo")
        rank, world = dist.get_rank(), dist.get_world_size()
    crew = Crew(rank, world)
    torch.manual_seed(35)
    net = Seq()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.4, momentum=0.9)
    scaled = partial(loss_of, net, parts=len(crew.own()))
    for step in range(1, 8):
        if step == LEAVE_BEFORE and world > 1:
            crew.shrink()
            if rank >= crew.world:
                break
            if not FAULTY:
                scaled = partial(loss_of, net, parts=len(crew.own()))
        optimizer.zero_grad()
        shown = torch.zeros(())
        for number in crew.own():
            loss = scaled(microbatch(step, number))
            loss.backward()
            shown += loss.detach()
        for t in [p.grad for p in net.parameters()] + [shown]:
            crew.mean(t)
        nn.utils.clip_grad_norm_(net.parameters(), 4.0)
        optimizer.step()
        if rank == 0:
            print(f"step {step} loss {shown.item():.7f}", flush=True)
    if "--save" in sys.argv and rank < crew.world:
        torch.save(net.state_dict(), os.path.join(sys.argv[sys.argv.index("--save") + 1], f"rank{rank}.pt"))
    if world > 1:
        dist.destroy_process_group()


main()
