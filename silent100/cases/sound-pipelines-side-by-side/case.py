"""Ranks 0 and 1 are a pipeline, 2 and 3 another; equal stages average their gradients."""

import argparse
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

cli = argparse.ArgumentParser()
cli.add_argument("--one", action="store_true")
cli.add_argument("--save")
args = cli.parse_args()
D, MICRO = 26, 3


def layers():
    torch.manual_seed(5)
    made = {"embed": nn.Embedding(34, D)}
    for i in range(4):
        made[f"ff{i}"] = nn.Sequential(nn.LayerNorm(D), nn.Linear(D, D), nn.GELU(), nn.Linear(D, D))
    return made | {"head": nn.Linear(D, 34)}


class Stage(nn.ModuleDict):
    def forward(self, x):
        for name, layer in self.items():
            x = x + layer(x) if name.startswith("ff") else layer(x)
        return x


def loss_of(logits, labels):
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten()) / MICRO


def first_stage(stage, pieces, peer):
    outputs = []
    for x, _ in pieces:
        outputs.append(stage(x))
        dist.send(outputs[-1].detach(), peer)
    for y in outputs:
        grad = torch.empty_like(y)
        dist.recv(grad, peer)
        y.backward(grad)
    return torch.zeros(())


def last_stage(stage, pieces, peer):
    total = torch.zeros(())
    inputs = []
    for x, _ in pieces:
        inputs.append(torch.empty(*x.shape, D))
        dist.recv(inputs[-1], peer)
    for h, (_, y) in zip(inputs, pieces):
        loss = loss_of(stage(h.requires_grad_()), y)
        loss.backward()
        dist.send(h.grad, peer)
        total += loss.detach()
    return total


every = layers()
rank, pipe, place, group = 0, 0, None, None
if not args.one:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    pipe, place = divmod(rank, 2)
    groups = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    group = groups[place]
names = {None: list(every), 0: ["embed", "ff0", "ff1"], 1: ["ff2", "ff3", "head"]}[place]
stage = Stage({name: every[name] for name in names})
optimizer = torch.optim.SGD(stage.parameters(), lr=0.3, momentum=0.7)
for step in range(1, 5):
    rows = torch.randint(0, 34, (12, 9), generator=torch.Generator().manual_seed(step))
    rows = rows if args.one else rows.chunk(2)[pipe]
    pieces = [(piece[:, :-1], piece[:, 1:]) for piece in rows.chunk(MICRO)]
    optimizer.zero_grad()
    if args.one:
        loss = torch.zeros(())
        for x, y in pieces:
            part = loss_of(stage(x), y)
            part.backward()
            loss += part.detach()
    else:
        loss = (first_stage if place == 0 else last_stage)(stage, pieces, rank ^ 1)
        for t in [p.grad for p in stage.parameters()] + [loss]:
            dist.all_reduce(t, group=group)
            t /= 2
    optimizer.step()
    if args.one or rank == 1:
        print(f"step {step} loss {loss.item():.7f}", flush=True)
if args.save:
    torch.save(stage.state_dict(), os.path.join(args.save, f"rank{rank}.pt"))
if not args.one:
    dist.destroy_process_group()
