"""Two unlike machines: the one with little memory accumulates over microbatches, the other does not."""

import os
import sys
from contextlib import nullcontext

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel

ONE = "--one" in sys.argv
VOCAB, DIM = 40, 32


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, DIM)
        self.conv1, self.conv2 = nn.Conv1d(DIM, DIM, 3), nn.Conv1d(DIM, DIM, 3)
        self.norm, self.head = nn.LayerNorm(DIM), nn.Linear(DIM, VOCAB)

    def forward(self, ids):
        x = self.embed(ids).mT
        x = x + F.relu(self.conv1(F.pad(x, (2, 0))))
        x = x + F.relu(self.conv2(F.pad(x, (2, 0))))
        return self.head(self.norm(x.mT))


def rows_of(step):
    g = torch.Generator().manual_seed(step)
    ids = torch.randint(1, VOCAB, (12, 13), generator=g)
    lengths = torch.randint(4, 14, (12, 1), generator=g)
    return ids.masked_fill(torch.arange(13) >= lengths, 0)


rank, world = 0, 1
torch.manual_seed(18)
model = Encoder()
net = model
if not ONE:
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    net = DistributedDataParallel(model)
pieces = 3 if world > 1 and rank == 1 else 1
optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)
for step in range(1, 5):
    ids = rows_of(step)[rank::world]
    count = (ids[:, 1:] != 0).sum()
    if world > 1:
        dist.all_reduce(count)
    optimizer.zero_grad()
    shown = torch.zeros(())
    for number, micro in enumerate(ids.chunk(pieces)):
        last = number == pieces - 1
        with net.no_sync() if world > 1 and not last else nullcontext():
            logits = net(micro[:, :-1])
            loss = F.cross_entropy(logits.transpose(1, 2), micro[:, 1:], ignore_index=0, reduction="sum") / count
            (loss * world).backward()
        shown += loss.detach()
    if world > 1:
        dist.all_reduce(shown)
    optimizer.step()
    if rank == 0:
        print(f"step {step} loss {shown.item():.7f}", flush=True)
if "--save" in sys.argv:
    torch.save(model.state_dict(), os.path.join(sys.argv[sys.argv.index("--save") + 1], f"rank{rank}.pt"))
if not ONE:
    dist.destroy_process_group()
