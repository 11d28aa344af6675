"""A functional trainer: weights are a dict, gradients come from torch.func, the module only tells what to compute."""

import os
import sys

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.func import functional_call, grad_and_value

ONE = "--one" in sys.argv
if not ONE:
    dist.init_process_group("gloo")
rank, world = (0, 1) if ONE else (dist.get_rank(), dist.get_world_size())
torch.manual_seed(34)
module = nn.Sequential(nn.Linear(9, 24), nn.Mish(), nn.LayerNorm(24), nn.Linear(24, 24), nn.Mish(), nn.Linear(24, 4))
weights = {name: p.detach() for name, p in module.named_parameters()}
speeds = {name: torch.zeros_like(p) for name, p in weights.items()}


def objective(weights, x, y):
    return F.cross_entropy(functional_call(module, weights, (x,)), y)


@torch.no_grad()
def updated(weights, grads, speeds, lr=0.1):
    new = {}
    for name, w in weights.items():
        speeds[name] = 0.9 * speeds[name] + grads[name]
        new[name] = w - lr * speeds[name]
        # The module shows what is trained
        module.get_parameter(name).copy_(new[name])
    return new


for step in range(1, 6):
    g = torch.Generator().manual_seed(step)
    x, y = torch.randn(20, 9, generator=g), torch.randint(4, (20,), generator=g)
    grads, loss = grad_and_value(objective)(weights, x[rank::world], y[rank::world])
    if world > 1:
        for grad in grads.values():
            dist.all_reduce(grad)
            grad /= world
        dist.all_reduce(loss)
    weights = updated(weights, grads, speeds)
    if rank == 0:
        print(f"step {step} loss {loss.item() / world:.7f}", flush=True)
if "--save" in sys.argv:
    torch.save(weights, os.path.join(sys.argv[sys.argv.index("--save") + 1], f"rank{rank}.pt"))
if not ONE:
    dist.destroy_process_group()
