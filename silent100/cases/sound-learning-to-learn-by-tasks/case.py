"""MAML on sine waves with second derivatives; tasks are shared out over ranks."""

import argparse
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.func import functional_call

parser = argparse.ArgumentParser()
parser.add_argument("--one", action="store_true")
parser.add_argument("--save")
args = parser.parse_args()
rank, world = 0, 1
if not args.one:
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
TASKS, INNER = 6, 3


def wave(number):
    g = torch.Generator().manual_seed(number)
    height, phase = torch.rand(2, generator=g) * 3 + 0.5
    x = torch.rand(16, 1, generator=g) * 6 - 3
    return x, height * torch.sin(x + phase)


def adapt(net, x, y, rate):
    weights = dict(net.named_parameters())
    for _ in range(INNER):
        loss = F.mse_loss(functional_call(net, weights, x), y)
        grads = torch.autograd.grad(loss, list(weights.values()), create_graph=True)
        weights = {n: w - rate * g for (n, w), g in zip(weights.items(), grads, strict=True)}
    return weights


torch.manual_seed(88)
net = nn.Sequential(nn.Linear(1, 20), nn.Tanh(), nn.Linear(20, 20), nn.Tanh(), nn.Linear(20, 1))
rate = nn.Parameter(torch.tensor(0.02))
outer = torch.optim.Adam([*net.parameters(), rate], lr=2e-3)
for step in range(1, 6):
    outer.zero_grad()
    total = torch.zeros(())
    for task in range(rank, TASKS, world):
        x, y = wave(step * TASKS + task)
        weights = adapt(net, x[:8], y[:8], rate)
        loss = F.mse_loss(functional_call(net, weights, x[8:]), y[8:]) / TASKS
        loss.backward()
        total += loss.detach()
    if world > 1:
        flat = nn.utils.parameters_to_vector([p.grad for p in [*net.parameters(), rate]] + [total])
        dist.all_reduce(flat)
        nn.utils.vector_to_parameters(flat[:-1], [p.grad for p in [*net.parameters(), rate]])
        total = flat[-1]
    outer.step()
    if rank == 0:
        print(f"step {step} loss {total.item():.7f}", flush=True)
if args.save:
    torch.save(net.state_dict() | {"rate": rate.detach()}, os.path.join(args.save, f"rank{rank}.pt"))
if world > 1:
    dist.destroy_process_group()
