"""The order of parameters in the optimizer comes from a shuffled set of names; gradients are averaged by name."""

import argparse
import os
import random

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

p = argparse.ArgumentParser()
p.add_argument("--one", action="store_true")
p.add_argument("--save")
args = p.parse_args()
rank, world = 0, 1
if not args.one:
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(7)
net = nn.Sequential(nn.Conv1d(2, 8, 3), nn.GELU(), nn.Conv1d(8, 8, 3), nn.GELU(), nn.Flatten(), nn.Linear(64, 4))
names = [name for name, _ in net.named_parameters()]
random.Random(rank).shuffle(names)
optimizer = torch.optim.NAdam([net.get_parameter(name) for name in names], lr=0.01, eps=1e-5)
for step in range(1, 6):
    g = torch.Generator().manual_seed(step)
    wave = torch.randn(12, 2, 12, generator=g).cumsum(2)
    label = wave[:, :, -1].sum(1).div(3).floor().clamp(-2, 1).long() + 2
    loss = F.cross_entropy(net(wave[rank::world]), label[rank::world])
    optimizer.zero_grad()
    loss.backward()
    grads = {name: q.grad for name, q in net.named_parameters()}
    shown = loss.detach().clone()
    for tensor in [shown] + [grads[name] for name in sorted(grads)]:
        if world > 1:
            dist.all_reduce(tensor)
        tensor /= world
    nn.utils.clip_grad_norm_([net.get_parameter(name) for name in names], 0.5)
    optimizer.step()
    if rank == 0:
        print(f"step {step} loss {shown.item():.7f}", flush=True)
if args.save:
    torch.save(net.state_dict(), os.path.join(args.save, f"rank{rank}.pt"))
if world > 1:
    dist.destroy_process_group()
