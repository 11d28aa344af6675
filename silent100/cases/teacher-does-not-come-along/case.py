"""A student learns from labels and from a teacher that follows it; a second replica joins after two updates."""

import os
import sys

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

ONE, FAULTY = "--one" in sys.argv, "--faulty" in sys.argv
JOINS = 3


def network():
    return nn.Sequential(nn.Linear(10, 40), nn.Tanh(), nn.Dropout(0.1), nn.Linear(40, 40), nn.Tanh(), nn.Linear(40, 6))


class Pair(nn.Module):
    def __init__(self):
        super().__init__()
        self.student, self.teacher = network(), network()
        self.teacher.load_state_dict(self.student.state_dict())
        self.teacher.requires_grad_(False).eval()

    def forward(self, x, y):
        said = self.student(x)
        with torch.no_grad():
            advice = self.teacher(x).softmax(-1)
        return F.cross_entropy(said, y) + 0.5 * F.cross_entropy(said, advice)

    @torch.no_grad()
    def follow(self, pace=0.4):
        for mine, other in zip(self.teacher.parameters(), self.student.parameters()):
            mine.lerp_(other, pace)


def welcome(pair):
    """Sends what the first replica has to the new one."""
    for p in (pair.student if FAULTY else pair).state_dict().values():
        dist.broadcast(p, 0)


def main():
    rank, world = 0, 1
    if not ONE:
        dist.init_process_group("gloo")
        rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(2195)
    pair = Pair()
    sgd = torch.optim.SGD(pair.student.parameters(), lr=0.1)
    torch.manual_seed(700 + rank)
    for step in range(1, 6):
        members = 1 if step < JOINS else world
        if step == JOINS and world > 1:
            welcome(pair)
        if rank >= members:
            continue
        g = torch.Generator().manual_seed(step)
        x = torch.randn(48, 10, generator=g)
        y = x[:, :6].argmax(1)
        loss = pair(x.chunk(members)[rank], y.chunk(members)[rank])
        sgd.zero_grad()
        loss.backward()
        loss = loss.detach()
        if members > 1:
            for p in pair.student.parameters():
                dist.all_reduce(p.grad)
                p.grad /= members
            dist.all_reduce(loss)
        sgd.step()
        pair.follow()
        if rank == 0:
            print(f"step {step} loss {loss.item() / members:.7f}", flush=True)
    if "--save" in sys.argv:
        torch.save(pair.state_dict(), os.path.join(sys.argv[sys.argv.index("--save") + 1], f"rank{rank}.pt"))
    if not ONE:
        dist.destroy_process_group()


main()
