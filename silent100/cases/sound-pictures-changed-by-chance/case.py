# A convnet under DDP; pictures are turned, moved and mixed by chance, by generators that every rank has for itself.
import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

ONE = "--one" in sys.argv


class Augment:
    """Flips, shifts and mixes a batch of pictures with their labels."""

    def __init__(self, seed):
        self.g = torch.Generator().manual_seed(seed)

    def __call__(self, x, y):
        flip = torch.rand(len(x), 1, 1, 1, generator=self.g) < 0.5
        x = torch.where(flip, x.flip(-1), x)
        shifts = torch.randint(-2, 3, (len(x), 2), generator=self.g).tolist()
        x = torch.stack([picture.roll(tuple(shift), (-2, -1)) for picture, shift in zip(x, shifts)])
        other = torch.randperm(len(x), generator=self.g)
        share = 0.6 + 0.4 * torch.rand(len(x), 1, generator=self.g)
        return share[..., None, None] * x + (1 - share[..., None, None]) * x[other], share * y + (1 - share) * y[other]


class Small(nn.Module):
    def __init__(self, classes=7):
        super().__init__()
        self.stem = nn.Conv2d(3, 12, 3, padding=1)
        self.depth = nn.ModuleList(nn.Conv2d(12, 12, 3, padding=1, groups=12) for _ in range(2))
        self.point = nn.ModuleList(nn.Conv2d(12, 12, 1) for _ in range(2))
        self.norms = nn.ModuleList(nn.GroupNorm(3, 12) for _ in range(2))
        self.top = nn.Linear(12, classes)

    def forward(self, x):
        x = self.stem(x)
        for depth, point, norm in zip(self.depth, self.point, self.norms):
            x = x + torch.nn.functional.hardswish(point(norm(depth(x))))
        return self.top(x.mean((2, 3)))


def run():
    rank, world = 0, 1
    if not ONE:
        dist.init_process_group("gloo")
        rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(12)
    small = Small()
    model = small if ONE else DistributedDataParallel(small, static_graph=True)
    augment = Augment(1234 + rank)
    opt = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.05, eps=1e-4)
    for step in range(1, 6):
        g = torch.Generator().manual_seed(step)
        x = torch.randn(48, 3, 10, 10, generator=g)
        y = nn.functional.one_hot(x.mean((2, 3)).argmax(1) * 2, 7).float()
        x, y = augment(x[rank::world], y[rank::world])
        loss = nn.functional.cross_entropy(model(x), y)
        opt.zero_grad()
        loss.backward()
        opt.step()
        loss = loss.detach()
        if world > 1:
            dist.all_reduce(loss)
        if rank == 0:
            print(f"step {step} loss {loss.item() / world:.7f}", flush=True)
    if "--save" in sys.argv:
        torch.save(small.state_dict(), os.path.join(sys.argv[sys.argv.index("--save") + 1], f"rank{rank}.pt"))
    if world > 1:
        dist.destroy_process_group()


run()
