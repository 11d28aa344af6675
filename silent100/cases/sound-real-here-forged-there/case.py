"""Generator and critic; real rows are judged on rank 0, forged ones on rank 1, which alone trains the generator."""

import argparse
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

flags = argparse.ArgumentParser(description=__doc__)
flags.add_argument("--one", action="store_true")
flags.add_argument("--save")
flags = flags.parse_args()
rank, world = 0, 1
if not flags.one:
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()

torch.manual_seed(91)
maker = nn.Sequential(nn.Linear(4, 32), nn.SiLU(), nn.Linear(32, 6))
judge = nn.Sequential(nn.Linear(6, 32), nn.LeakyReLU(0.2), nn.Linear(32, 1))
to_make = torch.optim.Adam(maker.parameters(), lr=4e-3, betas=(0.5, 0.9), eps=1e-4)
to_judge = torch.optim.Adam(judge.parameters(), lr=4e-3, betas=(0.5, 0.9), eps=1e-4)
last = rank == world - 1
for step in range(1, 6):
    g = torch.Generator().manual_seed(step)
    real, noise = torch.randn(12, 6, generator=g).cumsum(1), torch.randn(2, 12, 4, generator=g)
    loss = torch.zeros(())
    if rank == 0:
        loss = loss + F.softplus(-judge(real)).mean()
    if last:
        loss = loss + F.softplus(judge(maker(noise[0]).detach())).mean()
    to_judge.zero_grad()
    loss.backward()
    shown = loss.detach()
    if world > 1:
        dist.all_reduce(shown)
        for p in judge.parameters():
            dist.all_reduce(p.grad)
    to_judge.step()
    if last:
        to_make.zero_grad()
        F.softplus(-judge(maker(noise[1]))).mean().backward()
        to_make.step()
    if world > 1:
        for p in maker.parameters():
            dist.broadcast(p.data, world - 1)
    if rank == 0:
        print(f"step {step} loss {shown.item():.7f}", flush=True)
if flags.save:
    torch.save(
        {f"{n}.{k}": v for n, m in (("maker", maker), ("judge", judge)) for k, v in m.state_dict().items()},
        os.path.join(flags.save, f"rank{rank}.pt"),
    )
if world > 1:
    dist.destroy_process_group()
