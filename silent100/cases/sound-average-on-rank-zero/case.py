import argparse
import copy
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP


class Denoiser(nn.Module):
    """Predicts the noise in a small signal from the signal and a time."""

    def __init__(self, width=32):
        super().__init__()
        self.time = nn.Sequential(nn.Linear(1, width), nn.SiLU())
        self.inp, self.mid, self.out = nn.Linear(16, width), nn.Linear(width, width), nn.Linear(width, 16)

    def forward(self, x, t):
        h = F.silu(self.inp(x) + self.time(t))
        return self.out(F.silu(self.mid(h)) + h)


class Average:
    def __init__(self, model, decay=0.9):
        self.model, self.decay = copy.deepcopy(model).requires_grad_(False).eval(), decay

    @torch.no_grad()
    def update(self, model):
        for mine, new in zip(self.model.parameters(), model.parameters()):
            mine.lerp_(new, 1 - self.decay)


parser = argparse.ArgumentParser()
parser.add_argument("--one", action="store_true")
parser.add_argument("--save")
args = parser.parse_args()
rank, world = 0, 1
if not args.one:
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(5)
net = Denoiser()
model = net if args.one else DDP(net)
average = Average(net) if rank == 0 else None
optimizer = torch.optim.SGD(net.parameters(), lr=0.2, momentum=0.9, nesterov=True)
for step in range(1, 6):
    g = torch.Generator().manual_seed(900 + step)
    x, noise, t = torch.randn(16, 16, generator=g), torch.randn(16, 16, generator=g), torch.rand(16, 1, generator=g)
    mine = slice(rank * 16 // world, (rank + 1) * 16 // world)
    noisy = (1 - t) * x + t * noise
    loss = F.mse_loss(model(noisy[mine], t[mine]), noise[mine])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if rank == 0:
        average.update(net)
        with torch.no_grad():
            average.model(noisy, t)
    shown = loss.detach().clone()
    if world > 1:
        dist.all_reduce(shown)
    if rank == 0:
        print(f"step {step} loss {shown.item() / world:.7f}", flush=True)
if args.save:
    state = dict(net.state_dict())
    if rank == 0:
        state |= {f"average.{k}": v for k, v in average.model.state_dict().items()}
    torch.save(state, os.path.join(args.save, f"rank{rank}.pt"))
if world > 1:
    del model
    dist.destroy_process_group()
