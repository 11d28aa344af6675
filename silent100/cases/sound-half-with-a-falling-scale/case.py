"""float16 autocast with a dynamic loss scale that begins too high."""

import argparse
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel

p = argparse.ArgumentParser()
p.add_argument("--one", action="store_true")
p.add_argument("--save")
args = p.parse_args()
rank, world = 0, 1
if not args.one:
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(58)
net = nn.Sequential(
    nn.Conv1d(3, 16, 3, padding=1),
    nn.ReLU(),
    nn.Conv1d(16, 16, 3, stride=2),
    nn.ReLU(),
    nn.Flatten(),
    nn.Linear(112, 5),
)
model = net if args.one else DistributedDataParallel(net)
optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**40, backoff_factor=2.0**-13, growth_interval=3, growth_factor=2.0)
for step in range(1, 8):
    g = torch.Generator().manual_seed(step)
    x = torch.randn(20, 3, 16, generator=g)
    y = x.mean(1)[:, :15].view(20, 5, 3).sum(2).argmax(1)
    with torch.autocast("cpu", torch.float16):
        out = model(x[rank::world])
    loss = F.cross_entropy(out.float(), y[rank::world])
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    shown = loss.detach() / world
    if world > 1:
        dist.all_reduce(shown)
    if rank == 0:
        print(f"step {step} loss {shown.item():.6f}", flush=True)
if args.save:
    torch.save(net.state_dict(), os.path.join(args.save, f"rank{rank}.pt"))
if world > 1:
    del model
    dist.destroy_process_group()
