"""Rows come in files; in each step a rank reads its next file, and gradients are weighted by the rows of all."""

import os
import sys
from itertools import islice

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

ONE, FAULTY = "--one" in sys.argv, "--faulty" in sys.argv
if not ONE:
    dist.init_process_group("gloo")
rank, world = (0, 1) if ONE else (dist.get_rank(), dist.get_world_size())


FILES, VOCAB = 5, 28


def read(number):
    g = torch.Generator().manual_seed(500 + number)
    return torch.randint(0, VOCAB, (4 + number % 3, 9), generator=g)


def rounds():
    """Endless epochs; each item is this rank's file of the round, or nothing where files have run out."""
    while True:
        names = list(range(FILES))
        if FAULTY:
            names = names[: FILES // world * world]
        size = 2  # files read at once by the whole job
        for begin in range(0, len(names), size):
            together = names[begin : begin + size]
            yield [read(n) for n in together[rank::world]], sum(len(read(n)) for n in together)


class Lm(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.rnn, self.head = (
            nn.Embedding(VOCAB, 16),
            nn.GRU(16, 20, batch_first=True),
            nn.Linear(20, VOCAB),
        )

    def forward(self, ids):
        return self.head(self.rnn(self.words(ids))[0])


torch.manual_seed(50)
lm = Lm()
optimizer = torch.optim.Adam(lm.parameters(), lr=6e-3, eps=1e-4)
for step, (files, count) in enumerate(islice(rounds(), 6), 1):
    shown = torch.zeros(())
    for rows in files:
        losses = F.cross_entropy(lm(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten(), reduction="sum")
        loss = losses / (8 * count)
        loss.backward()
        shown += loss.detach()
    if world > 1:
        for p in lm.parameters():
            p.grad = torch.zeros_like(p) if p.grad is None else p.grad
            dist.all_reduce(p.grad)
        dist.all_reduce(shown)
    optimizer.step()
    optimizer.zero_grad()
    if rank == 0:
        print(f"step {step} loss {shown.item():.7f}", flush=True)
if "--save" in sys.argv:
    torch.save(lm.state_dict(), os.path.join(sys.argv[sys.argv.index("--save") + 1], f"rank{rank}.pt"))
if world > 1:
    dist.destroy_process_group()
