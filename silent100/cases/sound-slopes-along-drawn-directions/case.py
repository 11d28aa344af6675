"""Forward gradients: no backward pass, slopes along a few random directions."""

import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.func import functional_call, jvp

ONE = "--one" in sys.argv
rank, world = 0, 1
if not ONE:
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(89)
model = nn.Sequential(nn.Linear(6, 20), nn.Tanh(), nn.Linear(20, 20), nn.Tanh(), nn.Linear(20, 1))
weights = {k: p.detach() for k, p in model.named_parameters()}
directions = torch.Generator().manual_seed(5)

for step in range(1, 5):
    x = torch.randn(16, 6, generator=torch.Generator().manual_seed(step))
    y = x.square().mean(1, keepdim=True)
    x, y = x[rank::world], y[rank::world]

    def measure(w, x=x, y=y):
        return nn.functional.mse_loss(functional_call(model, w, (x,)), y)

    move = {k: torch.zeros_like(w) for k, w in weights.items()}
    for _ in range(4):
        v = {k: torch.randn(w.shape, generator=directions) for k, w in weights.items()}
        loss, slope = jvp(measure, (weights,), (v,))
        both = torch.stack([loss, slope]).detach()
        if world > 1:
            dist.all_reduce(both)
        for k in move:
            move[k] += both[1] / world * v[k] / 4
    weights = {k: w - 0.01 * move[k] for k, w in weights.items()}
    if rank == 0:
        print(f"step {step} loss {both[0].item() / world:.7f}", flush=True)
model.load_state_dict(weights)
if "--save" in sys.argv:
    torch.save(model.state_dict(), os.path.join(sys.argv[sys.argv.index("--save") + 1], f"rank{rank}.pt"))
if not ONE:
    dist.destroy_process_group()
