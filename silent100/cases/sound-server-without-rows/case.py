"""A parameter server: rank 0 has the weights, ranks 1 and 2 ask for them and answer with gradients."""

import argparse
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.utils import parameters_to_vector, vector_to_parameters

cli = argparse.ArgumentParser()
cli.add_argument("--one", action="store_true")
cli.add_argument("--save")
cli = cli.parse_args()
ROWS = {1: slice(0, 5), 2: slice(5, 8)}


class Judge(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(1, 5, 3), nn.Conv2d(5, 7, 3, stride=2)
        self.say = nn.Linear(7 * 4, 4)

    def forward(self, x):
        return self.say(F.elu(self.conv2(F.elu(self.conv1(x)))).flatten(1))


def loss_of(net, step, rows=slice(None)):
    g = torch.Generator().manual_seed(step)
    x, y = torch.randn(8, 1, 8, 8, generator=g), torch.randint(0, 4, (8,), generator=g)
    return F.cross_entropy(net(x[rows]), y[rows], reduction="sum") / 8


def serve(net, rank, updates):
    velocity = torch.zeros_like(parameters_to_vector(net.parameters()))
    for step in range(1, updates + 1):
        flat = parameters_to_vector(net.parameters()).detach()
        if cli.one:
            net.zero_grad()
            loss = loss_of(net, step)
            loss.backward()
            grad, loss = torch.cat([p.grad.flatten() for p in net.parameters()]), loss.item()
        else:
            for worker in ROWS:
                dist.send(flat, worker)
            grad, loss = torch.zeros_like(flat), 0.0
            for worker in reversed(ROWS):
                answer = torch.empty(len(flat) + 1)
                dist.recv(answer, worker)
                grad, loss = grad + answer[:-1], loss + answer[-1].item()
        velocity = 0.9 * velocity + grad
        vector_to_parameters(flat - 0.05 * velocity, net.parameters())
        print(f"step {step} loss {loss:.7f}", flush=True)
    if cli.save:
        torch.save(net.state_dict(), os.path.join(cli.save, "rank0.pt"))


def work(net, rank, updates):
    for step in range(1, updates + 1):
        flat = torch.empty_like(parameters_to_vector(net.parameters()).detach())
        dist.recv(flat, 0)
        vector_to_parameters(flat, net.parameters())
        net.zero_grad()
        loss = loss_of(net, step, ROWS[rank])
        loss.backward()
        dist.send(torch.cat([p.grad.flatten() for p in net.parameters()] + [loss.detach()[None]]), 0)


rank = 0
if not cli.one:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
torch.manual_seed(rank + 3)  # workers begin with anything at all
(work if rank else serve)(Judge(), rank, 6)
if not cli.one:
    dist.destroy_process_group()
