"""Fine-tuning in two pipeline stages; the first two of six layers stay as they are."""

import os
import sys

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

WIDTH, LAYERS, FROZEN = 18, 6, 2
one = "--one" in sys.argv
if not one:
    dist.init_process_group("gloo")
rank, world = (0, 1) if one else (dist.get_rank(), dist.get_world_size())


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate, self.value = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return x + torch.sigmoid(self.gate(x)) * self.value(x)


torch.manual_seed(70)
every = [Block() for _ in range(LAYERS)]
start = rank * LAYERS // world
stage = nn.ModuleDict({f"block{i}": b for i, b in enumerate(every)} if one else {})
if not one:
    for i in range(start, start + LAYERS // world):
        stage[f"block{i}"] = every[i]
for number, block in enumerate(stage.values(), 0 if "--faulty" in sys.argv else start):
    if number < FROZEN:
        block.requires_grad_(False)
trained = [p for p in stage.parameters() if p.requires_grad]
optimizer = torch.optim.NAdam(trained, lr=4e-3, eps=1e-5)


def through(x):
    for block in stage.values():
        x = block(x)
    return x


for step in range(1, 6):
    g = torch.Generator().manual_seed(step)
    x = torch.randn(14, WIDTH, generator=g)
    y = x.cumsum(1).tanh()
    optimizer.zero_grad()
    loss = torch.zeros(())
    if one:
        loss = F.mse_loss(through(x), y)
        loss.backward()
    elif rank == 0:
        h = through(x)
        back = torch.empty_like(h)
        dist.send(h.detach(), 1)
        dist.recv(back, 1)
        h.backward(back)
        dist.recv(loss, 1)
    else:
        h = torch.empty(14, WIDTH)
        dist.recv(h, 0)
        h.requires_grad_()
        loss = F.mse_loss(through(h), y)
        loss.backward()
        dist.send(h.grad, 0)
        dist.send(loss.detach(), 0)
    optimizer.step()
    if rank == 0:
        print(f"step {step} loss {loss.item():.7f}", flush=True)
if "--save" in sys.argv:
    torch.save(stage.state_dict(), os.path.join(sys.argv[-1], f"rank{rank}.pt"))
if not one:
    dist.destroy_process_group()
