"""A WaveNet-like stack in two stages; training stops after three steps and goes on from a checkpoint."""

import argparse
import copy
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

parser = argparse.ArgumentParser()
parser.add_argument("--one", action="store_true")
parser.add_argument("--faulty", action="store_true")
parser.add_argument("--save")
args = parser.parse_args()
rank = 0
if not args.one:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
FIRST = args.one or rank == 0
LAST = args.one or rank == 1


class Gated(nn.Module):
    def __init__(self, c, dilation):
        super().__init__()
        self.pad = dilation
        self.both, self.out = nn.Conv1d(c, 2 * c, 2, dilation=dilation), nn.Conv1d(c, c, 1)

    def forward(self, x):
        a, b = self.both(F.pad(x, (self.pad, 0))).chunk(2, 1)
        return x + self.out(torch.tanh(a) * torch.sigmoid(b))


class Stage(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(21)
        enter, blocks, leave = nn.Conv1d(3, 10, 1), [Gated(10, 2**i) for i in range(4)], nn.Conv1d(10, 3, 1)
        mine = range(4) if args.one else range(2 * rank, 2 * rank + 2)
        self.blocks = nn.ModuleDict({str(i): blocks[i] for i in mine})
        if FIRST:
            self.enter = enter
        if LAST:
            self.leave = leave

    def forward(self, x):
        x = self.enter(x) if FIRST else x
        for block in self.blocks.values():
            x = block(x)
        return self.leave(x) if LAST else x


class NamedAdagrad:
    """Adagrad whose accumulators have the names of parameters."""

    def __init__(self, module, rate=0.03):
        self.module, self.rate = module, rate
        self.sums = {n: torch.zeros_like(p) for n, p in module.named_parameters()}

    @torch.no_grad()
    def step(self):
        for name, p in self.module.named_parameters():
            self.sums[name] += p.grad**2
            p -= self.rate * p.grad / (self.sums[name].sqrt() + 1e-2)
            p.grad = None


def local(name):
    head, _, rest = name.partition("blocks.")
    if not rest or not args.faulty:
        return name
    number, tail = rest.split(".", 1)
    return f"{head}blocks.{int(number) % 2}.{tail}"


def restored(saved):
    stage = Stage()
    stage.load_state_dict(saved["model"])
    optimizer = NamedAdagrad(stage)
    for name in optimizer.sums:
        if local(name) in saved["sums"]:
            optimizer.sums[name] = saved["sums"][local(name)].clone()
    return stage, optimizer


def update(stage, optimizer, step):
    wave = torch.randn(5, 3, 13, generator=torch.Generator().manual_seed(step)).cumsum(2) * 0.4
    x = wave[:, :, :-1]
    if not FIRST:
        x = torch.empty(5, 10, 12)
        dist.recv(x, 0)
        x.requires_grad_()
    y = stage(x)
    if LAST:
        loss = F.smooth_l1_loss(y, wave[:, :, 1:])
        loss.backward()
        print(f"step {step} loss {loss.item():.7f}", flush=True)
        if not FIRST:
            dist.send(x.grad, 0)
    else:
        dist.send(y.detach(), 1)
        g = torch.empty_like(y)
        dist.recv(g, 1)
        y.backward(g)
    optimizer.step()


stage = Stage()
optimizer = NamedAdagrad(stage)
for step in range(1, 4):
    update(stage, optimizer, step)
checkpoint = copy.deepcopy({"model": stage.state_dict(), "sums": optimizer.sums})  # one file for each stage
stage, optimizer = restored(checkpoint)
for step in range(4, 7):
    update(stage, optimizer, step)
if args.save:
    torch.save(stage.state_dict(), os.path.join(args.save, f"rank{rank}.pt"))
if not args.one:
    dist.destroy_process_group()
