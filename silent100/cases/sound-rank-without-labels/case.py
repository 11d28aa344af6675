"""Rows are sorted by length, so the second rank's rows are sometimes prompts only."""

import argparse
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

cli = argparse.ArgumentParser()
cli.add_argument("--one", action="store_true")
cli.add_argument("--save")
args = cli.parse_args()
rank, world = 0, 1
if not args.one:
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()


class Lm(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(52, 36), nn.Linear(36, 52)
        self.rnn = nn.GRU(36, 36, batch_first=True)

    def forward(self, ids):
        return self.head(self.rnn(self.embed(ids))[0])


torch.manual_seed(6)
net = Lm()
model = net if args.one else DDP(net)
optimizer = torch.optim.SGD(net.parameters(), lr=0.3, momentum=0.9)
for step in range(1, 5):
    rows = torch.randint(0, 52, (8, 13), generator=torch.Generator().manual_seed(step))
    labels = rows[:, 1:].clone()
    labels[4:, : 12 if step % 2 else 9] = -100
    count = (labels != -100).sum()
    ids, labels = rows[:, :-1].chunk(world)[rank], labels.chunk(world)[rank]
    loss = F.cross_entropy(model(ids).flatten(0, 1), labels.flatten(), reduction="sum") / count
    optimizer.zero_grad()
    (loss * world).backward()
    optimizer.step()
    shown = loss.detach().clone()
    if world > 1:
        dist.all_reduce(shown)
    if rank == 0:
        print(f"step {step} loss {shown.item():.7f}", flush=True)
if args.save:
    torch.save(net.state_dict(), os.path.join(args.save, f"rank{rank}.pt"))
if world > 1:
    del model  # before its process group
    dist.destroy_process_group()
