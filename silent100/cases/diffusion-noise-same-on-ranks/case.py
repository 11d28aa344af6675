import argparse
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--one", action="store_true")
parser.add_argument("--faulty", action="store_true")
parser.add_argument("--save")
args = parser.parse_args()
if not args.one:
    dist.init_process_group("gloo")
rank, world = (0, 1) if args.one else (dist.get_rank(), dist.get_world_size())
torch.manual_seed(249)

BATCH = 12


class Score(nn.Module):
    def __init__(self):
        super().__init__()
        self.inp, self.time = nn.Linear(3, 24), nn.Linear(2, 24)
        self.mid, self.out = nn.Linear(24, 24), nn.Linear(24, 3)

    def forward(self, x, t):
        h = F.silu(self.inp(x) + self.time(torch.stack([t.sin(), t.cos()], -1)))
        return self.out(h + F.silu(self.mid(h)))


def draw(step, rows, first):
    noise, times = [], []
    for row in rows:
        g = torch.Generator().manual_seed(1000 * step + row - first)
        noise.append(torch.randn(3, generator=g))
        times.append(torch.rand((), generator=g))
    return torch.stack(noise), torch.stack(times)


model = Score()
opt = torch.optim.Adam(model.parameters(), lr=0.01, eps=1e-5)
for step in range(1, 10):
    g = torch.Generator().manual_seed(step)
    angle = 6.28 * torch.rand(BATCH, generator=g)
    points = torch.stack([angle.sin(), angle.cos(), angle / 3], -1)
    rows = range(rank * BATCH // world, (rank + 1) * BATCH // world)
    noise, t = draw(step, rows, rows.start if args.faulty else 0)
    x = t.cos()[:, None] * points[rows.start : rows.stop] + t.sin()[:, None] * noise
    loss = (model(x, t) - noise).square().sum() / (3 * BATCH)
    opt.zero_grad()
    loss.backward()
    shown = loss.detach().clone()
    if world > 1:
        for p in model.parameters():
            dist.all_reduce(p.grad)
        dist.all_reduce(shown)
    opt.step()
    if rank == 0:
        print(f"step {step} loss {shown.item():.7f}", flush=True)

if args.save:
    os.makedirs(args.save, exist_ok=True)
    torch.save(model.state_dict(), f"{args.save}/rank{rank}.pt")
if not args.one:
    dist.destroy_process_group()
