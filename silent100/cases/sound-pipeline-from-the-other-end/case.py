"""An LSTM tagger in three stages by send and recv, of which rank 2 holds the first."""

import os
import sys

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

args = sys.argv[1:]
single = "--one" in args
if not single:
    dist.init_process_group("gloo")
rank = 0 if single else dist.get_rank()
MICRO, D = 3, 16


class Recurrent(nn.Module):
    def __init__(self, out=D):
        super().__init__()
        self.lstm, self.out = nn.LSTM(D, D, batch_first=True), nn.Linear(D, out)

    def forward(self, x):
        y = self.out(self.lstm(x)[0])
        return x + y if y.shape == x.shape else y


torch.manual_seed(66)
stages = nn.ModuleDict(
    {"first": nn.Sequential(nn.Embedding(15, D), Recurrent()), "middle": Recurrent(), "last": Recurrent(6)}
)
mine = stages if single else nn.ModuleDict({(name := ["last", "middle", "first"][rank]): stages[name]})
opt = torch.optim.RMSprop(mine.parameters(), lr=2e-3)


def stage(inputs, labels):
    """Runs all microbatches forward, then all backward, newest first."""
    kept, total = [], 0.0
    for i in range(MICRO):
        if rank == 2:
            x, y = None, mine["first"](inputs[i])
        else:
            x = torch.empty(len(labels[i]), labels[i].shape[1], D)
            dist.recv(x, rank + 1)
            y = mine["middle" if rank else "last"](x.requires_grad_())
        if rank:
            dist.send(y.detach(), rank - 1)
        else:
            y = F.cross_entropy(y.flatten(0, 1), labels[i].flatten()) / MICRO
            total += y.item()
        kept.append((x, y))
    for x, y in reversed(kept):
        grad = None
        if rank:
            grad = torch.empty_like(y)
            dist.recv(grad, rank - 1)
        y.backward(grad)
        if rank < 2:
            dist.send(x.grad, rank + 1)
    return total


for step in range(1, 6):
    g = torch.Generator().manual_seed(step)
    ids = torch.randint(15, (6, 9), generator=g)
    labels = (ids + ids.roll(1, 1)) % 6
    opt.zero_grad()
    if single:
        x = ids
        for part in stages.values():
            x = part(x)
        loss = F.cross_entropy(x.flatten(0, 1), labels.flatten())
        loss.backward()
        loss = loss.item()
    else:
        loss = stage(ids.chunk(MICRO), labels.chunk(MICRO))
    opt.step()
    if rank == 0:
        print(f"step {step} loss {loss:.7f}", flush=True)
if "--save" in args:
    torch.save(mine.state_dict(), os.path.join(args[args.index("--save") + 1], f"rank{rank}.pt"))
if not single:
    dist.destroy_process_group()
