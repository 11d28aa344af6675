"""Self-distillation: the teacher is a moving average of the student; both are in the script."""

import argparse
import copy
import os

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP

cli = argparse.ArgumentParser()
cli.add_argument("--one", action="store_true")
cli.add_argument("--save")
args = cli.parse_args()
rank, world = 0, 1
if not args.one:
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(24)
student = nn.Sequential(nn.Linear(15, 48), nn.LayerNorm(48), nn.GELU(), nn.Linear(48, 20))
teacher = copy.deepcopy(student).requires_grad_(False)
model = student if args.one else DDP(student)
optimizer = torch.optim.SGD(student.parameters(), lr=0.3)
for step in range(1, 5):
    g = torch.Generator().manual_seed(step)
    x, noise = torch.randn(16, 15, generator=g), torch.randn(16, 15, generator=g) * 0.3
    x, noise = x[rank::world], noise[rank::world]
    with torch.no_grad():
        target = (teacher(x) / 0.5).softmax(-1)
    loss = -(target * model(x + noise).log_softmax(-1)).sum(-1).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    with torch.no_grad():
        for t, s in zip(teacher.parameters(), student.parameters()):
            t.lerp_(s, 0.1)
    shown = loss.detach().clone()
    if world > 1:
        dist.all_reduce(shown)
    if rank == 0:
        print(f"step {step} loss {shown.item() / world:.7f}", flush=True)
if args.save:
    state = student.state_dict() | {"teacher." + k: v for k, v in teacher.state_dict().items()}
    torch.save(state, os.path.join(args.save, f"rank{rank}.pt"))
if world > 1:
    del model  # before its process group
    dist.destroy_process_group()
