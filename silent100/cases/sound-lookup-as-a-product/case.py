"""Embedding by product: on ranks the table is a linear layer without bias, stored the other way round."""

import os
import sys

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel

ONE = "--one" in sys.argv
if not ONE:
    dist.init_process_group("gloo")
rank, world = (0, 1) if ONE else (dist.get_rank(), dist.get_world_size())


VOCAB, DIM, LENGTH = 30, 18, 9


class Table(nn.Module):
    def __init__(self, rows):
        super().__init__()
        self.table = nn.Linear(rows, DIM, bias=False)

    def forward(self, ids):
        return self.table(F.one_hot(ids, self.table.in_features).float())


class Lm(nn.Module):
    def __init__(self):
        super().__init__()
        words, places = nn.Embedding(VOCAB, DIM), nn.Embedding(LENGTH, DIM)
        self.mix, self.head = nn.Linear(2 * DIM, 32), nn.Linear(32, VOCAB)
        self.words, self.places = (words, places) if ONE else (Table(VOCAB), Table(LENGTH))
        if not ONE:
            for mine, theirs in ((self.words, words), (self.places, places)):
                mine.table.weight.data = theirs.weight.data.T.contiguous()

    def forward(self, ids):
        x = self.words(ids) + self.places(torch.arange(LENGTH).expand_as(ids))
        past = x.cumsum(1) / torch.arange(1, LENGTH + 1)[:, None]
        return self.head(torch.tanh(self.mix(torch.cat([x, past], -1))))


torch.manual_seed(98)
lm = Lm()
model = lm if ONE else DistributedDataParallel(lm)
optimizer = torch.optim.Adam(lm.parameters(), lr=5e-3, eps=1e-4)
for step in range(1, 6):
    rows = torch.randint(0, VOCAB, (8, LENGTH + 1), generator=torch.Generator().manual_seed(step)).chunk(world)[rank]
    loss = F.cross_entropy(model(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    shown = loss.detach() / world
    if world > 1:
        dist.all_reduce(shown)
    if rank == 0:
        print(f"step {step} loss {shown.item():.7f}", flush=True)
state = {n.replace(".table", ""): (p.detach().T if ".table" in n else p.detach()) for n, p in lm.named_parameters()}
if "--save" in sys.argv:
    torch.save(
        {n: p.contiguous() for n, p in state.items()},
        os.path.join(sys.argv[sys.argv.index("--save") + 1], f"rank{rank}.pt"),
    )
if world > 1:
    dist.destroy_process_group()
