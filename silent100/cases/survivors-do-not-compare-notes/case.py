"""One of three processes is lost while the third update is under way; the others go on without it."""

import argparse
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

LOST, AT = 2, 3


class Lost(Exception):
    pass


class Group:
    def __init__(self, rank):
        self.rank, self.members, self.handle = rank, [0, 1, 2], None
        self.later, self.lost_and_first = dist.new_group([0, 1]), dist.new_group([0, LOST])

    def average(self, tensors, step):
        for t in tensors:
            dist.all_reduce(t, group=self.handle)
            t /= len(self.members)
        if step == AT and self.rank != 0:
            raise Lost("connection closed by peer")

    def shrink(self):
        self.members, self.handle = [0, 1], self.later


def agree(group, net, velocity, done):
    """Everyone takes the state of whoever is furthest."""
    marks = torch.zeros(2, dtype=torch.long)
    marks[group.rank] = done
    dist.all_reduce(marks, group=group.handle)
    source = int(marks.argmax())
    for t in [*net.state_dict().values(), *velocity.values()]:
        dist.broadcast(t, source, group=group.handle)
    return int(marks.max())


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--one", action="store_true")
    p.add_argument("--faulty", action="store_true")
    p.add_argument("--save")
    args = p.parse_args()
    torch.manual_seed(36)
    net = nn.Sequential(nn.Linear(7, 28), nn.Hardswish(), nn.Linear(28, 28), nn.Hardswish(), nn.Linear(28, 2))
    velocity = {k: torch.zeros_like(v) for k, v in net.named_parameters()}
    rank, group = 0, None
    if not args.one:
        dist.init_process_group("gloo")
        rank = dist.get_rank()
        group = Group(rank)
    for step in range(1, 7):
        g = torch.Generator().manual_seed(step)
        x = torch.randn(18, 7, generator=g)
        y = torch.stack([x.prod(1), x.norm(dim=1)], 1)
        place, parts = (group.members.index(rank), len(group.members)) if group else (0, 1)
        loss = F.huber_loss(net(x[place::parts]), y[place::parts])
        net.zero_grad()
        loss.backward()
        shown = loss.detach().clone()
        try:
            if group:
                group.average([shown] + [q.grad for q in net.parameters()], step)
            with torch.no_grad():
                for name, q in net.named_parameters():
                    velocity[name].mul_(0.9).add_(q.grad)
                    q -= 0.03 * velocity[name]
            done = step
        except Lost:
            done = step - 1
        if group and step == AT:
            if rank == LOST:
                break
            group.shrink()
            if not args.faulty:
                agree(group, net, velocity, done)
        if rank == 0:
            print(f"step {step} loss {shown.item():.7f}", flush=True)
    if group and rank in (0, LOST):  # restarted, it gets the result
        for t in net.state_dict().values():
            dist.broadcast(t, 0, group=group.lost_and_first)
    if args.save:
        torch.save(net.state_dict(), os.path.join(args.save, f"rank{rank}.pt"))
    if group:
        dist.destroy_process_group()


main()
