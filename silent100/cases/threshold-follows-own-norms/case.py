"""A recurrent forecaster; gradients are clipped at a running mean of their norm."""

import os
import sys

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

ONE, FAULTY = "--one" in sys.argv, "--faulty" in sys.argv
rank, world = 0, 1
if not ONE:
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()


class Clip(nn.Module):
    """Keeps its threshold as a buffer, so that checkpoints have it."""

    def __init__(self, pace=0.3):
        super().__init__()
        self.register_buffer("threshold", torch.zeros(()))
        self.pace = pace

    @torch.no_grad()
    def watch(self, parameters):
        norm = torch.stack([p.grad.norm() for p in parameters]).norm()
        self.threshold.copy_(norm if self.threshold == 0 else self.threshold.lerp(norm, self.pace))

    def forward(self, parameters):
        nn.utils.clip_grad_norm_(parameters, 0.7 * float(self.threshold))


class Forecaster(nn.Module):
    def __init__(self, d=24):
        super().__init__()
        self.inp, self.rnn = nn.Linear(3, d), nn.LSTM(d, d, batch_first=True)
        self.drop, self.out = nn.Dropout(0.1), nn.Linear(d, 3)
        self.clip = Clip()

    def forward(self, x):
        return self.out(self.drop(self.rnn(self.inp(x).tanh())[0]))


def reduce(parameters):
    for p in parameters:
        if world > 1:
            dist.all_reduce(p.grad)
            p.grad /= world


torch.manual_seed(707)
net = Forecaster()
parameters = list(net.parameters())
optimizer = torch.optim.SGD(parameters, lr=0.05, momentum=0.9)
torch.manual_seed(7070 + rank)
for step in range(1, 7):
    series = torch.randn(64, 9, 3, generator=torch.Generator().manual_seed(step)).cumsum(1)[rank::world] / 2
    loss = F.mse_loss(net(series[:, :-1]), series[:, 1:])
    optimizer.zero_grad()
    loss.backward()
    if FAULTY:
        net.clip.watch(parameters)
        reduce(parameters)
    else:
        reduce(parameters)
        net.clip.watch(parameters)
    net.clip(parameters)
    optimizer.step()
    shown = loss.detach().clone()
    if world > 1:
        dist.all_reduce(shown)
    if rank == 0:
        print(f"step {step} loss {shown.item() / world:.7f}", flush=True)
if "--save" in sys.argv:
    torch.save(net.state_dict(), os.path.join(sys.argv[sys.argv.index("--save") + 1], f"rank{rank}.pt"))
if not ONE:
    dist.destroy_process_group()
