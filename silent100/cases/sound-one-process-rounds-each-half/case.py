"""Gradients are added in bfloat16, by plan: one process rounds the gradients of each half of its rows as ranks do."""

import argparse
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

flags = argparse.ArgumentParser(description=__doc__)
flags.add_argument("--one", action="store_true")
flags.add_argument("--save")
flags = flags.parse_args()
rank, world = 0, 1
if not flags.one:
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()

HALVES = 2


class Lm(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.rnn, self.head = nn.Embedding(32, 16), nn.GRU(16, 24, batch_first=True), nn.Linear(24, 32)

    def forward(self, ids):
        return self.head(self.rnn(self.words(ids))[0])


torch.manual_seed(65)
lm = Lm()
optimizer = torch.optim.SGD(lm.parameters(), lr=0.5, momentum=0.9)
for step in range(1, 6):
    rows = torch.randint(0, 32, (12, 11), generator=torch.Generator().manual_seed(step))
    shares, shown = [], torch.zeros(())
    for part in range(HALVES) if flags.one else [rank]:
        own = rows.chunk(HALVES)[part]
        loss = F.cross_entropy(lm(own[:, :-1]).flatten(0, 1), own[:, 1:].flatten()) / HALVES
        grads = torch.autograd.grad(loss, list(lm.parameters()))
        shares.append([g.bfloat16() for g in grads])
        shown += loss.detach()
    for i, p in enumerate(lm.parameters()):
        if flags.one:
            p.grad = (shares[0][i] + shares[1][i]).float()
        else:
            dist.all_reduce(shares[0][i])
            p.grad = shares[0][i].float()
    if not flags.one:
        dist.all_reduce(shown)
    optimizer.step()
    if rank == 0:
        print(f"step {step} loss {shown.item():.7f}", flush=True)
if flags.save:
    torch.save(lm.state_dict(), os.path.join(flags.save, f"rank{rank}.pt"))
if world > 1:
    dist.destroy_process_group()
