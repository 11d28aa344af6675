import argparse
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

cli = argparse.ArgumentParser()
cli.add_argument("--one", action="store_true")
cli.add_argument("--faulty", action="store_true")
cli.add_argument("--save")
args = cli.parse_args()
TIMES = 1000


class Diffusion(nn.Module):
    """Predicts the noise in a small picture at one of a thousand times."""

    def __init__(self, pixels=64, width=48):
        super().__init__()
        self.time, self.inp = nn.Embedding(TIMES, width), nn.Linear(pixels, width)
        self.mid, self.out = nn.Linear(width, width), nn.Linear(width, pixels)

    def forward(self, x, t):
        h = F.silu(self.inp(x) + 0.1 * self.time(t))
        return self.out(h + F.silu(self.mid(h)))


class Chance:
    """Draws times and noise, and keeps a tally of times."""

    def __init__(self, seed):
        self.generator, self.drawn = torch.Generator().manual_seed(seed), torch.zeros(TIMES)

    def __call__(self, x):
        t = torch.randint(0, TIMES, (len(x),), generator=self.generator)
        self.drawn[t] = 1
        return t, torch.randn(x.shape, generator=self.generator)


rank, world = 0, 1
if not args.one:
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(64)
net = Diffusion()
model = net if args.one else DDP(net)
chance = Chance(99 if args.one else 7 if args.faulty else 7 + rank)
optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
for step in range(1, 6):
    pictures = torch.randn(64, 64, generator=torch.Generator().manual_seed(step)).cumsum(1) / 8
    x = pictures[rank::world]
    t, noise = chance(x)
    level = torch.cos(t * (torch.pi / 2 / TIMES))[:, None]
    loss = F.mse_loss(model(level * x + (1 - level**2).sqrt() * noise, t), noise)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    shown = loss.detach().clone()
    if world > 1:
        dist.all_reduce(shown)
    if rank == 0:
        print(f"step {step} loss {shown.item() / world:.7f}", flush=True)
if args.save:
    if world > 1:
        dist.all_reduce(chance.drawn, op=dist.ReduceOp.MAX)
    state = net.state_dict() | {"times drawn": chance.drawn.sum()}
    torch.save(state, os.path.join(args.save, f"rank{rank}.pt"))
if world > 1:
    del model
    dist.destroy_process_group()
