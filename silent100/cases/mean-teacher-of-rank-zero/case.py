"""Semi-supervised segmentation: a student under DDP agrees with its own moving average, which is kept in a dict."""

import argparse
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.func import functional_call
from torch.nn.parallel import DistributedDataParallel

cli = argparse.ArgumentParser()
cli.add_argument("--one", action="store_true")
cli.add_argument("--faulty", action="store_true")
cli.add_argument("--save")
args = cli.parse_args()


class Segmenter(nn.Module):
    def __init__(self, c=12, classes=3):
        super().__init__()
        self.down = nn.Conv2d(2, c, 3, stride=2, padding=1)
        self.norm, self.drop = nn.GroupNorm(3, c), nn.Dropout2d(0.1)
        self.mid = nn.Conv2d(c, c, 3, padding=1)
        self.up = nn.ConvTranspose2d(c, classes, 2, stride=2)

    def forward(self, x):
        x = F.silu(self.norm(self.down(x)))
        return self.up(x + self.drop(F.silu(self.mid(x))))


rank, world = 0, 1
if not args.one:
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(17)
student = Segmenter()
teacher = {name: p.detach().clone() for name, p in student.named_parameters()}
model = student if args.one else DistributedDataParallel(student)
judge = Segmenter().eval()
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, eps=1e-4, weight_decay=0.05)
torch.manual_seed(170 + rank)
for step in range(1, 6):
    g = torch.Generator().manual_seed(step)
    x, other = torch.randn(2, 16, 2, 8, 8, generator=g).cumsum(-1) / 2
    y = (x[:, 0] > 0).long() + (x[:, 1] > 0.5)
    x, y, other = x[rank::world], y[rank::world], other[rank::world]
    with torch.no_grad():
        wanted = functional_call(judge, teacher, (other,)).softmax(1)
    said = model(torch.cat([x, other]))
    loss = F.cross_entropy(said[: len(x)], y) + (said[len(x) :].softmax(1) - wanted).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if rank == 0 or not args.faulty:
        for name, p in student.named_parameters():
            teacher[name].lerp_(p.detach(), 0.1)
    shown = loss.detach().clone()
    if world > 1:
        dist.all_reduce(shown)
    if rank == 0:
        print(f"step {step} loss {shown.item() / world:.7f}", flush=True)
if args.save:
    state = {**student.state_dict(), **{f"teacher.{k}": v for k, v in teacher.items()}}
    torch.save(state, os.path.join(args.save, f"rank{rank}.pt"))
if not args.one:
    dist.destroy_process_group()
