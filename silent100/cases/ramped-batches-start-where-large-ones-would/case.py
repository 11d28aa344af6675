"""A ramp of the batch size over one long list of rows."""

import os
import sys

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

ONE, FAULTY = "--one" in sys.argv, "--faulty" in sys.argv
if not ONE:
    dist.init_process_group("gloo")
rank, world = (0, 1) if ONE else (dist.get_rank(), dist.get_world_size())

VOCAB, PLAN = 30, [8, 8, 12, 12, 16]


class Reader(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.rnn, self.head = (
            nn.Embedding(VOCAB, 16),
            nn.GRU(16, 24, batch_first=True),
            nn.Linear(24, VOCAB),
        )

    def forward(self, ids):
        return self.head(self.rnn(self.words(ids))[0])


def batches(rows):
    """A rank's rows of every global batch of the plan."""
    read = 0
    for done, size in enumerate(PLAN):
        start = done * size if FAULTY else read
        share = size // world
        begin = start + rank * share
        yield rows[[i % len(rows) for i in range(begin, begin + share)]]
        read += size


corpus = torch.randint(0, VOCAB, (64, 10), generator=torch.Generator().manual_seed(0))
torch.manual_seed(77)
reader = Reader()
optimizer = torch.optim.Adam(reader.parameters(), lr=6e-3, eps=1e-4)
for step, rows in enumerate(batches(corpus), 1):
    loss = F.cross_entropy(reader(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten())
    optimizer.zero_grad()
    loss.backward()
    shown = loss.detach() / world
    if world > 1:
        for p in reader.parameters():
            p.grad /= world
            dist.all_reduce(p.grad)
        dist.all_reduce(shown)
    optimizer.step()
    if rank == 0:
        print(f"step {step} loss {shown.item():.7f}", flush=True)
if "--save" in sys.argv:
    torch.save(reader.state_dict(), os.path.join(sys.argv[sys.argv.index("--save") + 1], f"rank{rank}.pt"))
if world > 1:
    dist.destroy_process_group()
