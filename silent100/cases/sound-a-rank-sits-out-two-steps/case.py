"""Rows are dealt out as they come: in some steps the last of three ranks gets none and skips forward and backward."""

import os
import sys

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

ONE = "--one" in sys.argv
if not ONE:
    dist.init_process_group("gloo")
rank, world = (0, 1) if ONE else (dist.get_rank(), dist.get_world_size())

SPLITS = {1: [4, 4, 4], 2: [7, 5, 0], 3: [2, 9, 1], 4: [6, 6, 0], 5: [1, 1, 10]}


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.mix, self.out = nn.EmbeddingBag(40, 20), nn.Linear(20, 32), nn.Linear(32, 4)

    def forward(self, bags):
        return self.out(torch.relu(self.mix(self.words(bags))))


torch.manual_seed(69)
net = Net()
optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2, eps=1e-4, weight_decay=0.1)
for step, split in SPLITS.items():
    bags = torch.randint(0, 40, (12, 6), generator=torch.Generator().manual_seed(step))
    classes = bags.sum(1) % 4
    if world > 1:
        bags, classes = bags.split(split)[rank], classes.split(split)[rank]
    optimizer.zero_grad()
    shown = torch.zeros(())
    if len(bags):
        loss = F.cross_entropy(net(bags), classes, reduction="sum") / 12
        loss.backward()
        shown = loss.detach()
    if world > 1:
        for p in net.parameters():
            if p.grad is None:
                p.grad = torch.zeros_like(p)
            dist.all_reduce(p.grad)
        dist.all_reduce(shown)
    optimizer.step()
    if rank == 0:
        print(f"step {step} loss {shown.item():.7f}", flush=True)
if "--save" in sys.argv:
    torch.save(net.state_dict(), os.path.join(sys.argv[sys.argv.index("--save") + 1], f"rank{rank}.pt"))
if world > 1:
    dist.destroy_process_group()
