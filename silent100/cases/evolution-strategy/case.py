import argparse

import torch
import torch.distributed as dist

parser = argparse.ArgumentParser()
parser.add_argument("--one", action="store_true")
parser.add_argument("--save")
opts = parser.parse_args()
rank, world = 0, 1
if not opts.one:
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()

POP, SIGMA, LR = 24, 0.05, 0.15
gen = torch.Generator().manual_seed(0)
X = torch.randn(64, 5, generator=gen)
Y = torch.sin(X.sum(1, keepdim=True)) + 0.1 * torch.randn(64, 1, generator=gen)
shapes = {"w1": (5, 16), "b1": (16,), "w2": (16, 1), "b2": (1,)}
theta = {k: 0.4 * torch.randn(s, generator=gen) for k, s in shapes.items()}
velocity = {k: torch.zeros(s) for k, s in shapes.items()}


def perturbation(step, member):
    g = torch.Generator().manual_seed(step * 1000 + member // 2)
    sign = 1.0 if member % 2 == 0 else -1.0
    return {k: sign * torch.randn(s, generator=g) for k, s in shapes.items()}


def score(w):
    h = torch.tanh(X @ w["w1"] + w["b1"])
    return ((h @ w["w2"] + w["b2"] - Y) ** 2).mean()


for step in range(1, 7):
    fitness = torch.zeros(POP)
    for member in range(rank, POP, world):
        eps = perturbation(step, member)
        fitness[member] = score({k: theta[k] + SIGMA * eps[k] for k in theta})
    if world > 1:
        dist.all_reduce(fitness)
    ranks = fitness.argsort().argsort().float()
    utility = ranks / (POP - 1) - 0.5
    for k in theta:
        direction = sum(utility[m] * perturbation(step, m)[k] for m in range(POP)) / (POP * SIGMA)
        velocity[k] = 0.8 * velocity[k] + direction
        theta[k] = theta[k] - LR * SIGMA * velocity[k]
    if rank == 0:
        print(f"step {step} loss {fitness.mean().item():.7f}", flush=True)

if opts.save:
    torch.save(theta, f"{opts.save}/rank{rank}.pt")
if world > 1:
    dist.barrier()
    dist.destroy_process_group()
