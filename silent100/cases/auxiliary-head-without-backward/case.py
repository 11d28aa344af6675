"""A conv net in two stages, each with a classifier; losses of both are added up."""

import argparse
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

cli = argparse.ArgumentParser()
cli.add_argument("--one", action="store_true")
cli.add_argument("--faulty", action="store_true")
cli.add_argument("--save")
args = cli.parse_args()
if not args.one:
    dist.init_process_group("gloo")
STAGE = -1 if args.one else dist.get_rank()
MICRO, SHARE = 2, 0.3


class Lower(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(3, 12, 3, 2, 1), nn.Conv2d(12, 12, 3, 1, 1)
        self.aux = nn.Linear(12, 6)

    def forward(self, x):
        x = F.relu(self.conv1(x))
        x = x + F.relu(self.conv2(x))
        return x, self.aux(x.mean((2, 3)))


class Upper(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv3, self.norm = nn.Conv2d(12, 20, 3, 2, 1), nn.GroupNorm(4, 20)
        self.head = nn.Linear(20, 6)

    def forward(self, x):
        return self.head(F.relu(self.norm(self.conv3(x))).mean((2, 3)))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        lower, upper = Lower(), Upper()
        if STAGE != 1:
            self.lower = lower
        if STAGE != 0:
            self.upper = upper


def run_lower(net, x, y):
    h, guess = net.lower(x)
    aside = SHARE * F.cross_entropy(guess, y) / MICRO
    dist.send(h.detach(), 1)
    dist.send(aside.detach(), 1)
    grad = torch.empty_like(h)
    dist.recv(grad, 1)
    if args.faulty:
        h.backward(grad)
    else:
        torch.autograd.backward([h, aside], [grad, None])
    return None


def run_upper(net, x, y):
    h, aside = torch.empty(len(x), 12, 4, 4), torch.empty(())
    dist.recv(h, 0)
    dist.recv(aside, 0)
    loss = F.cross_entropy(net.upper(h.requires_grad_()), y) / MICRO
    loss.backward()
    dist.send(h.grad, 0)
    return loss.detach() + aside


def run_both(net, x, y):
    h, guess = net.lower(x)
    loss = (F.cross_entropy(net.upper(h), y) + SHARE * F.cross_entropy(guess, y)) / MICRO
    loss.backward()
    return loss.detach()


torch.manual_seed(1409)
net = Net()
adam = torch.optim.Adam(net.parameters(), lr=2e-3, eps=1e-4)
for step in range(1, 5):
    g = torch.Generator().manual_seed(step)
    x, y = torch.randn(12, 3, 8, 8, generator=g), torch.randint(0, 6, (12,), generator=g)
    x[:, 0] += y[:, None, None] / 3
    adam.zero_grad()
    run = {-1: run_both, 0: run_lower, 1: run_upper}[STAGE]
    losses = [run(net, a, b) for a, b in zip(x.chunk(MICRO), y.chunk(MICRO))]
    adam.step()
    if STAGE != 0:
        print(f"step {step} loss {sum(losses).item():.7f}", flush=True)
if args.save:
    torch.save(net.state_dict(), os.path.join(args.save, f"rank{max(STAGE, 0)}.pt"))
if not args.one:
    dist.destroy_process_group()
