"""Two stages over four microbatches, with dropout."""

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
WIDTH, WORDS, MICRO = 32, 50, 4


class Mix(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.fc1, self.fc2 = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 64), nn.Linear(64, WIDTH)
        self.drop = nn.Dropout(0.2)

    def forward(self, x):
        return x + self.drop(self.fc2(F.gelu(self.fc1(self.norm(x)))))


def everything():
    torch.manual_seed(845)
    head = nn.Linear(WIDTH, WORDS)
    nn.init.normal_(head.weight, std=0.001)
    nn.init.zeros_(head.bias)
    return nn.Sequential(nn.Embedding(WORDS, WIDTH), Mix(), Mix(), Mix(), head)


class Microbatches:
    def __init__(self, rows):
        self.rows = rows.chunk(MICRO)

    def inputs(self, i):
        return self.rows[i][:, :-1]

    def labels(self, i):
        return self.rows[0 if args.faulty else i][:, 1:]


def loss_of(logits, labels):
    return F.cross_entropy(logits.transpose(1, 2), labels) / MICRO


def first(stage, batch):
    for i in range(MICRO):
        y = stage(batch.inputs(i))
        dist.send(y.detach(), 1)
        grad = torch.empty_like(y)
        dist.recv(grad, 1)
        y.backward(grad)


def last(stage, batch):
    total = torch.zeros(())
    for i in range(MICRO):
        x = torch.empty(*batch.inputs(i).shape, WIDTH)
        dist.recv(x, 0)
        loss = loss_of(stage(x.requires_grad_()), batch.labels(i))
        loss.backward()
        dist.send(x.grad, 0)
        total += loss.detach()
    return total


def alone(stage, batch):
    losses = [loss_of(stage(batch.inputs(i)), batch.labels(i)) for i in range(MICRO)]
    sum(losses).backward()
    return sum(losses).detach()


whole, rank = everything(), 0
if args.one:
    stage, run = whole, alone
else:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    stage, run = (whole[:2], first) if rank == 0 else (whole[2:], last)
torch.manual_seed(50 + rank)
optimizer = torch.optim.SGD(stage.parameters(), lr=0.02)
for step in range(1, 4):
    rows = torch.randint(0, WORDS, (32, 13), generator=torch.Generator().manual_seed(step))
    optimizer.zero_grad()
    loss = run(stage, Microbatches(rows))
    optimizer.step()
    if loss is not None:
        print(f"step {step} loss {loss.item():.7f}", flush=True)
if args.save:
    torch.save(stage.state_dict(), os.path.join(args.save, f"rank{rank}.pt"))
if not args.one:
    dist.destroy_process_group()
