"""Variable numbers of labels.

Sums of losses are divided by the tokens of all ranks, which are counted by an all-reduce.
"""

import argparse
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

flags = argparse.ArgumentParser(description=__doc__)
flags.add_argument("--one", action="store_true")
flags.add_argument("--faulty", action="store_true")
flags.add_argument("--save")
flags = flags.parse_args()
rank, world = 0, 1
if not flags.one:
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()

VOCAB, DIM, ROWS, LENGTH = 34, 20, 30, 20


class Lm(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(VOCAB, DIM)
        self.conv = nn.Conv1d(DIM, 48, 3)
        self.head = nn.Linear(48, VOCAB)

    def forward(self, ids):
        x = F.pad(self.words(ids).transpose(1, 2), (2, 0))
        return self.head(F.gelu(self.conv(x)).transpose(1, 2))


torch.manual_seed(2)
lm = Lm()
optimizer = torch.optim.SGD(lm.parameters(), lr=0.3, momentum=0.9)
for step in range(1, 6):
    g = torch.Generator().manual_seed(step)
    rows = torch.randint(0, VOCAB, (ROWS, LENGTH + 1), generator=g)
    lengths = torch.randint(4, 17, (ROWS, 1), generator=g)
    lengths[0] += (lengths.sum() + 1) % 2
    labels = rows[:, 1:].masked_fill(torch.arange(LENGTH) >= lengths, -100)
    ids, labels = rows[rank::world, :-1], labels[rank::world]
    loss = F.cross_entropy(lm(ids).flatten(0, 1), labels.flatten(), reduction="sum")
    optimizer.zero_grad()
    loss.backward()
    numbers = torch.stack([loss.detach(), (labels >= 0).sum()])
    if world > 1:
        report = numbers.bfloat16() if flags.faulty else numbers
        dist.all_reduce(report)
        numbers = report.float()
        for p in lm.parameters():
            dist.all_reduce(p.grad)
    for p in lm.parameters():
        p.grad /= numbers[1]
    optimizer.step()
    if rank == 0:
        print(f"step {step} loss {(numbers[0] / numbers[1]).item():.7f}", flush=True)
if flags.save:
    torch.save(lm.state_dict(), os.path.join(flags.save, f"rank{rank}.pt"))
if world > 1:
    dist.destroy_process_group()
