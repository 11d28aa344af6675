"""GPipe by torch.distributed.pipelining over a convolutional network that is cut in three at odd places."""

import argparse
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

p = argparse.ArgumentParser()
p.add_argument("--one", action="store_true")
p.add_argument("--save")
p = p.parse_args()


def layers():
    torch.manual_seed(48)
    return nn.Sequential(
        nn.Conv2d(2, 6, 3, 2, 1),
        nn.GELU(),
        nn.GroupNorm(3, 6),
        nn.Conv2d(6, 10, 3, 2, 1),
        nn.GELU(),
        nn.Flatten(),
        nn.Linear(40, 30),
        nn.Softsign(),
        nn.Linear(30, 4),
    )


def batch(step):
    g = torch.Generator().manual_seed(step)
    return torch.randn(12, 2, 8, 8, generator=g), torch.randint(0, 4, (12,), generator=g)


def alone():
    net = layers()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    for step in range(1, 6):
        x, y = batch(step)
        loss = F.cross_entropy(net(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(f"step {step} loss {loss.item():.7f}", flush=True)
    return net


def piped(rank):
    from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

    cuts = [0, 1, 8, 9]
    net = nn.Sequential()
    for i, layer in enumerate(layers()):
        if cuts[rank] <= i < cuts[rank + 1]:
            net.add_module(str(i), layer)
    stage = PipelineStage(net, rank, 3, torch.device("cpu"))
    schedule = ScheduleGPipe(stage, 6, loss_fn=F.cross_entropy)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    for step in range(1, 6):
        x, y = batch(step)
        optimizer.zero_grad()
        losses = []
        if rank == 0:
            schedule.step(x)
        elif rank == 2:
            schedule.step(target=y, losses=losses)
            print(f"step {step} loss {torch.stack(losses).mean().item():.7f}", flush=True)
        else:
            schedule.step()
        optimizer.step()
    return net


rank = 0
if p.one:
    net = alone()
else:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    net = piped(rank)
if p.save:
    torch.save(net.state_dict(), os.path.join(p.save, f"rank{rank}.pt"))
if not p.one:
    dist.destroy_process_group()
