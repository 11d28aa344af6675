"""A small vision transformer under DDP with gradient accumulation and clipping by norm."""

import contextlib
import os
import sys

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel

ONE, FAULTY = "--one" in sys.argv, "--faulty" in sys.argv
ACCUMULATE, LIMIT = 2, 1.0


class Vit(nn.Module):
    def __init__(self, d=24, classes=7):
        super().__init__()
        self.patch = nn.Conv2d(3, d, 4, stride=4)
        self.token = nn.Parameter(torch.zeros(1, 1, d))
        self.places = nn.Parameter(torch.randn(1, 10, d) * 0.1)
        self.layer = nn.TransformerEncoderLayer(d, 3, 2 * d, dropout=0.0, batch_first=True, norm_first=True)
        self.norm, self.head = nn.LayerNorm(d), nn.Linear(d, classes)

    def forward(self, x):
        x = self.patch(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(len(x), -1, -1), x], 1) + self.places
        return self.head(self.norm(self.layer(x)[:, 0]))


def update(model, sgd, images, labels):
    total = torch.zeros(())
    pieces = list(zip(images.chunk(ACCUMULATE), labels.chunk(ACCUMULATE)))
    for i, (x, y) in enumerate(pieces):
        last = i == len(pieces) - 1
        with contextlib.nullcontext() if last or ONE else model.no_sync():
            loss = F.cross_entropy(model(x), y) / ACCUMULATE
            loss.backward()
        if last or FAULTY:
            nn.utils.clip_grad_norm_(model.parameters(), LIMIT)
        total += loss.detach()
    sgd.step()
    sgd.zero_grad()
    return total


def main():
    rank, world = 0, 1
    if not ONE:
        dist.init_process_group("gloo")
        rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(901)
    vit = Vit()
    model = vit if ONE else DistributedDataParallel(vit)
    sgd = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(1, 5):
        g = torch.Generator().manual_seed(step)
        images, labels = torch.randn(16, 3, 12, 12, generator=g), torch.randint(0, 7, (16,), generator=g)
        images += labels[:, None, None, None] / 3
        total = update(model, sgd, images[rank::world], labels[rank::world])
        if world > 1:
            dist.all_reduce(total)
        if rank == 0:
            print(f"step {step} loss {total.item() / world:.7f}", flush=True)
    if "--save" in sys.argv:
        torch.save(vit.state_dict(), os.path.join(sys.argv[sys.argv.index("--save") + 1], f"rank{rank}.pt"))
    if not ONE:
        dist.destroy_process_group()


main()
