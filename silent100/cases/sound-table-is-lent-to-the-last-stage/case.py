"""Three-layer pipeline by hand with a tied head, whose weight is an input of the last stage."""

import os
import sys

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

ONE = "--one" in sys.argv
if not ONE:
    dist.init_process_group("gloo")
STAGE = -1 if ONE else dist.get_rank()
VOCAB, DIM, MICRO = 46, 24, 3


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.gate, self.up = nn.RMSNorm(DIM), nn.Linear(DIM, 40), nn.Linear(DIM, 40)
        self.down = nn.Linear(40, DIM)

    def forward(self, x):
        z = self.norm(x)
        z = z.cumsum(1) / torch.arange(1, x.shape[1] + 1)[:, None] + z
        return x + self.down(F.silu(self.gate(z)) * self.up(z))


class Stage(nn.Module):
    def __init__(self):
        super().__init__()
        table = torch.randn(VOCAB, DIM) * 0.3
        blocks = [Block() for _ in range(3)]
        if STAGE < 1:
            self.table = nn.Parameter(table)
        self.blocks = nn.ModuleDict({str(i): b for i, b in enumerate(blocks) if ONE or (i == 0) == (STAGE == 0)})

    def forward(self, x):
        if STAGE < 1:
            x = F.embedding(x, self.table)
        for block in self.blocks.values():
            x = block(x)
        return x


def first_stage(stage, pieces):
    dist.send(stage.table.detach(), 1)
    outs = [stage(ids) for ids, _ in pieces]
    for out in outs:
        dist.send(out.detach(), 1)
    for out in outs:
        grad = torch.empty_like(out)
        dist.recv(grad, 1)
        out.backward(grad)
    of_head = torch.empty_like(stage.table)
    dist.recv(of_head, 1)
    stage.table.grad += of_head


def last_stage(stage, pieces):
    table, total, inputs = torch.empty(VOCAB, DIM), torch.zeros(()), []
    dist.recv(table, 0)
    table.requires_grad_()
    for ids, _ in pieces:
        inputs.append(torch.empty(*ids.shape, DIM))
        dist.recv(inputs[-1], 0)
    for x, (_, labels) in zip(inputs, pieces):
        loss = F.cross_entropy((stage(x.requires_grad_()) @ table.T).flatten(0, 1), labels.flatten()) / MICRO
        loss.backward()
        dist.send(x.grad, 0)
        total += loss.detach()
    dist.send(table.grad, 0)
    return total


def everything(stage, pieces):
    total = torch.zeros(())
    for ids, labels in pieces:
        loss = F.cross_entropy((stage(ids) @ stage.table.T).flatten(0, 1), labels.flatten()) / MICRO
        loss.backward()
        total += loss.detach()
    return total


torch.manual_seed(1608)
stage = Stage()
sgd = torch.optim.SGD(stage.parameters(), lr=0.2, momentum=0.9)
for step in range(1, 5):
    rows = torch.randint(0, VOCAB, (9, 8), generator=torch.Generator().manual_seed(step))
    pieces = [(r[:, :-1], r[:, 1:]) for r in rows.chunk(MICRO)]
    sgd.zero_grad()
    total = {-1: everything, 0: first_stage, 1: last_stage}[STAGE](stage, pieces)
    sgd.step()
    if total is not None:
        print(f"step {step} loss {total.item():.7f}", flush=True)
if "--save" in sys.argv:
    torch.save(stage.state_dict(), os.path.join(sys.argv[sys.argv.index("--save") + 1], f"rank{max(STAGE, 0)}.pt"))
if not ONE:
    dist.destroy_process_group()
