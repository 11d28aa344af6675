"""Stochastic weight averaging as torch has it: a second model, its own schedule, norms measured anew at the end."""

import os
import sys

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.optim.swa_utils import SWALR, AveragedModel, update_bn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.inp, self.norm, self.mid, self.out = (
            nn.Linear(6, 28),
            nn.BatchNorm1d(28),
            nn.Linear(28, 28),
            nn.Linear(28, 3),
        )

    def forward(self, x):
        x = F.relu(self.inp(x))
        # Statistics are kept and not used, so ranks need not share them
        self.norm(x.detach())
        return self.out(F.relu(self.mid(x)))


def main():
    one = "--one" in sys.argv
    rank, world = 0, 1
    if not one:
        dist.init_process_group("gloo")
        rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(88)
    net = Net()
    average = AveragedModel(net) if rank == world - 1 else None
    learned = [p for name, p in net.named_parameters() if not name.startswith("norm")]
    optimizer = torch.optim.SGD(learned, lr=0.2, momentum=0.9)
    schedule = SWALR(optimizer, swa_lr=0.05, anneal_epochs=3)

    def data(step):
        g = torch.Generator().manual_seed(step)
        x = torch.randn(16, 6, generator=g)
        return x, x[:, :3].square().argmax(1)

    for step in range(1, 8):
        x, y = (side[rank::world] for side in data(step))
        loss = F.cross_entropy(net(x), y)
        optimizer.zero_grad()
        loss.backward()
        loss = loss.detach()
        if world > 1:
            for p in learned:
                dist.all_reduce(p.grad)
                p.grad /= world
            dist.all_reduce(loss)
        optimizer.step()
        schedule.step()
        if average is not None and step >= 3:
            average.update_parameters(net)
        if rank == 0:
            print(f"step {step} loss {loss.item() / world:.7f}", flush=True)
    if average is not None:
        update_bn([data(step)[0] for step in range(1, 4)], average)
    if "--save" in sys.argv:
        state = {name: p for name, p in net.state_dict().items() if not name.startswith("norm")}
        torch.save(state, os.path.join(sys.argv[sys.argv.index("--save") + 1], f"rank{rank}.pt"))
    if world > 1:
        dist.destroy_process_group()


main()
