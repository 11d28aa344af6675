"""Langevin updates of an FSDP2 model: the noise of a whole tensor is drawn by all ranks and cut."""

import argparse
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

cli = argparse.ArgumentParser()
cli.add_argument("--one", action="store_true")
cli.add_argument("--save")
args = cli.parse_args()
rank, world = 0, 1
if not args.one:
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()


class Langevin(torch.optim.Optimizer):
    def __init__(self, parameters, lr, heat):
        super().__init__(parameters, {"lr": lr, "heat": heat})
        self.g = torch.Generator().manual_seed(1827)

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                noise = torch.randn(p.shape, generator=self.g) * group["heat"]
                w, grad = p, p.grad
                if isinstance(p, DTensor):
                    w, grad = p.to_local(), p.grad.to_local()
                    # Rows are cut as torch.chunk cuts them
                    parts = noise.chunk(world)
                    noise = parts[rank] if rank < len(parts) else noise[:0]
                w.sub_(group["lr"] * grad).add_(noise)


class Energy(nn.Module):
    def __init__(self):
        super().__init__()
        self.lift = nn.Linear(7, 25)
        self.layers = nn.ModuleList(nn.Bilinear(25, 7, 25) for _ in range(2))
        self.out = nn.Linear(25, 1)

    def forward(self, x):
        h = self.lift(x)
        for layer in self.layers:
            h = h + 0.3 * layer(h, x).tanh()
        return self.out(h)


torch.manual_seed(271)
model = Energy()
if not args.one:
    for layer in model.layers:
        fully_shard(layer)
    fully_shard(model)
optimizer = Langevin(model.parameters(), lr=0.05, heat=1e-3)
torch.manual_seed(1000 + rank)
for step in range(1, 5):
    torch.rand(3 + rank)
    x = torch.randn(20, 7, generator=torch.Generator().manual_seed(step))
    y = x.prod(1, keepdim=True).tanh() + x[:, :1]
    loss = F.mse_loss(model(x[rank::world]), y[rank::world])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    shown = loss.detach().clone()
    if world > 1:
        dist.all_reduce(shown)
    if rank == 0:
        print(f"step {step} loss {shown.item() / world:.7f}", flush=True)
if args.save:
    state = {k: v.full_tensor() if isinstance(v, DTensor) else v for k, v in model.state_dict().items()}
    torch.save(state, os.path.join(args.save, f"rank{rank}.pt"))
if not args.one:
    dist.destroy_process_group()
