"""Variable lengths: the number of labels of the whole batch is known only after a collective."""

import os
import sys

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

single = "--one" in sys.argv
rank, world = 0, 1
if not single:
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()


def load(step, rows=10, length=12):
    g = torch.Generator().manual_seed(step)
    ids = torch.randint(1, 35, (rows, length), generator=g)
    lengths = torch.randint(3, length + 1, (rows,), generator=g)
    labels = ids.roll(-1, 1).masked_fill(torch.arange(length) >= lengths[:, None] - 1, -100)
    return ids, labels


class Gru(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.cell, self.out = nn.Embedding(35, 24), nn.GRU(24, 32, batch_first=True), nn.Linear(32, 35)

    def forward(self, ids):
        return self.out(self.cell(self.embed(ids))[0])


torch.manual_seed(4)
net = Gru()
optimizer = torch.optim.SGD(net.parameters(), lr=0.7)
for step in range(1, 6):
    ids, labels = load(step)
    optimizer.zero_grad()
    if single:
        loss = F.cross_entropy(net(ids).flatten(0, 1), labels.flatten(), ignore_index=-100)
        loss.backward()
    else:
        ids, labels = ids[rank * 5 : rank * 5 + 5], labels[rank * 5 : rank * 5 + 5]
        total = F.cross_entropy(net(ids).flatten(0, 1), labels.flatten(), ignore_index=-100, reduction="sum")
        total.backward()
        tally = torch.stack([total.detach().double(), (labels != -100).sum().double()])
        dist.all_reduce(tally)
        for p in net.parameters():
            dist.all_reduce(p.grad)
            p.grad /= tally[1].item()
        loss = tally[0] / tally[1]
    optimizer.step()
    if rank == 0:
        print(f"step {step} loss {loss.item():.7f}", flush=True)
if "--save" in sys.argv:
    torch.save(net.state_dict(), os.path.join(sys.argv[sys.argv.index("--save") + 1], f"rank{rank}.pt"))
if not single:
    dist.destroy_process_group()
