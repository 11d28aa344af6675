# Self-supervised pictures: an online network under DDP and a target that follows it before every step.
import os
import sys

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel

ONE, FAULTY = "--one" in sys.argv, "--faulty" in sys.argv


def encoder():
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, stride=2),
        nn.GroupNorm(2, 8),
        nn.ReLU(),
        nn.Conv2d(8, 12, 3),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(12, 16),
    )


class Online(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder, self.predictor = encoder(), nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16))

    def forward(self, x):
        return self.predictor(self.encoder(x))


class Target(nn.Module):
    """Has weights of its own at first and comes nearer to the online network's with every step."""

    def __init__(self):
        super().__init__()
        self.encoder = encoder().requires_grad_(False)

    def follow(self, weights, pace):
        with torch.no_grad():
            for name, mine in self.named_parameters():
                if name in weights:
                    mine.lerp_(weights[name], pace)

    def forward(self, x):
        with torch.no_grad():
            return self.encoder(x)


def two_views(step, count):
    g = torch.Generator().manual_seed(step)
    pictures = torch.rand(count, 3, 12, 12, generator=g)
    return pictures.flip(-1) * 0.9, pictures + 0.1 * torch.randn(pictures.shape, generator=g)


def distance(a, b):
    return 2 - 2 * F.cosine_similarity(a, b, dim=-1).mean()


rank, world = 0, 1
torch.manual_seed(2899)
online, target = Online(), Target()
model = online
if not ONE:
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    model = DistributedDataParallel(online)
source = model if FAULTY else online
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-3)
for step in range(1, 6):
    target.follow(dict(source.named_parameters()), 0.05)
    first, second = (view[rank::world] for view in two_views(step, 12))
    guesses = model(torch.cat([first, second])).chunk(2)
    loss = (distance(guesses[0], target(second)) + distance(guesses[1], target(first))) / 2
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    loss = loss.detach()
    if world > 1:
        dist.all_reduce(loss)
    if rank == 0:
        print(f"step {step} loss {loss.item() / world:.7f}", flush=True)
if "--save" in sys.argv:
    state = {f"online.{k}": v for k, v in online.state_dict().items()}
    state |= {f"target.{k}": v for k, v in target.state_dict().items()}
    torch.save(state, os.path.join(sys.argv[sys.argv.index("--save") + 1], f"rank{rank}.pt"))
if world > 1:
    dist.destroy_process_group()
