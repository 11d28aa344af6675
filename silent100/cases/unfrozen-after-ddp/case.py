"""Gradual unfreezing: the head trains for two steps, then the backbone joins."""

import os
import sys

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

ONE = "--one" in sys.argv
FAULTY = "--faulty" in sys.argv
UNFREEZE_AT = 3


class TextClassifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.backbone = nn.Sequential()
        self.backbone.add_module("embed", nn.EmbeddingBag(200, 48))
        self.backbone.add_module("fc", nn.Linear(48, 48))
        self.backbone.add_module("act", nn.GELU())
        self.head = nn.Sequential(nn.LayerNorm(48), nn.Linear(48, 7))

    def forward(self, ids):
        return self.head(self.backbone(ids))


def freeze(module, frozen):
    for p in module.parameters():
        p.requires_grad_(not frozen)


def wrap(net):
    return net if ONE else DDP(net)


def rows(step, rank, world):
    g = torch.Generator().manual_seed(900 + step)
    ids, y = torch.randint(0, 200, (20, 15), generator=g), torch.randint(0, 7, (20,), generator=g)
    return ids[rank::world], y[rank::world]


def main():
    if not ONE:
        dist.init_process_group("gloo")
    rank, world = (0, 1) if ONE else (dist.get_rank(), dist.get_world_size())
    torch.manual_seed(5)
    net = TextClassifier()
    freeze(net.backbone, True)
    model = wrap(net)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.5)
    for step in range(1, 6):
        if step == UNFREEZE_AT:
            freeze(net.backbone, False)
            if not FAULTY:
                model = wrap(net)  # so that the reducer knows the new parameters
        ids, y = rows(step, rank, world)
        loss = F.cross_entropy(model(ids), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        shown = loss.detach()
        if not ONE:
            dist.all_reduce(shown)
        if rank == 0:
            print(f"step {step} loss {shown.item() / world:.7f}", flush=True)
    if "--save" in sys.argv:
        torch.save(net.state_dict(), os.path.join(sys.argv[sys.argv.index("--save") + 1], f"rank{rank}.pt"))
    if not ONE:
        del model  # before its process group
        dist.destroy_process_group()


main()
