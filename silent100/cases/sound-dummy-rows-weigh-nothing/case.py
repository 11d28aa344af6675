"""Ragged batches under FSDP2: every rank runs a forward of the same shape."""

import os
import sys

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.fsdp import fully_shard

ONE = "--one" in sys.argv
SPLITS = [(6, 3), (2, 7), (5, 5), (8, 1), (4, 0)]
rank, world = 0, 1


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(33, 22)
        self.layers = nn.ModuleList(nn.GRU(22, 22, batch_first=True) for _ in range(2))
        self.out = nn.Linear(22, 33)

    def forward(self, ids):
        x = self.embed(ids)
        for layer in self.layers:
            x = x + layer(x)[0]
        return self.out(x)


torch.manual_seed(56)
net = Net()
if not ONE:
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    fully_shard(net.embed)
    fully_shard(net.out)
    fully_shard(net)
optimizer = torch.optim.SGD(net.parameters(), lr=0.5)
for step, split in enumerate(SPLITS, 1):
    rows = torch.randint(0, 33, (sum(split), 9), generator=torch.Generator().manual_seed(step))
    labels_in_all, weights = rows.shape[0] * 8, torch.ones(len(rows))
    if not ONE:
        mine = rows.split(split)[rank]
        missing = max(split) - len(mine)
        weights = torch.cat([torch.ones(len(mine)), torch.zeros(missing)])
        rows = torch.cat([mine, rows[:1].expand(missing, -1)])
    losses = F.cross_entropy(net(rows[:, :-1]).transpose(1, 2), rows[:, 1:], reduction="none")
    loss = (losses * weights[:, None]).sum() / labels_in_all
    # fully_shard averages over ranks
    (loss * world).backward()
    optimizer.step()
    optimizer.zero_grad()
    shown = loss.detach()
    if not ONE:
        dist.all_reduce(shown)
    if rank == 0:
        print(f"step {step} loss {shown.item():.7f}", flush=True)
if "--save" in sys.argv:
    state = {k: v if ONE else v.full_tensor() for k, v in net.state_dict().items()}
    torch.save(state, os.path.join(sys.argv[sys.argv.index("--save") + 1], f"rank{rank}.pt"))
if not ONE:
    dist.destroy_process_group()
