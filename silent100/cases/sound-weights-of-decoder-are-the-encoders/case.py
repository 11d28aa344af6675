"""A sparse autoencoder with tied weights over two tensor ranks; features of a rank compete with nobody else's."""

import os
import sys

import torch
import torch.distributed as dist
import torch.nn as nn

lone = "--one" in sys.argv
if not lone:
    dist.init_process_group("gloo")
rank, tp = (0, 1) if lone else (dist.get_rank(), dist.get_world_size())


class Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        if tp > 1:
            x = x.contiguous().clone()
            dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx, g):
        return g


class Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, g):
        return Sum.apply(g)


class Sparse(nn.Module):
    def __init__(self, dim=12, features=48):
        super().__init__()
        w = torch.randn(features, dim) / dim**0.5
        self.dictionary = nn.Parameter(w.chunk(tp)[rank].clone())
        self.threshold = nn.Parameter(torch.full((features // tp,), -0.1))
        self.centre = nn.Parameter(torch.zeros(dim))

    def forward(self, x):
        inside = Copy.apply(x - self.centre)
        active = torch.relu(inside @ self.dictionary.T + self.threshold)
        back = Sum.apply(active @ self.dictionary) + self.centre
        return back, Sum.apply(active.sum(-1)).mean()


torch.manual_seed(21)
enter = nn.Linear(8, 12)
sae = Sparse()
opt = torch.optim.Adam([*enter.parameters(), *sae.parameters()], lr=3e-3)
for step in range(1, 7):
    x = enter(torch.randn(16, 8, generator=torch.Generator().manual_seed(step)))
    back, active = sae(x)
    loss = (back - x.detach()).square().sum(-1).mean() + 0.02 * active + 0.01 * x.square().mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
    if rank == 0:
        print(f"step {step} loss {loss.item():.7f}", flush=True)
if "--save" in sys.argv:
    state = {f"enter.{n}": p.detach() for n, p in enter.named_parameters()} | {"centre": sae.centre.detach()}
    state |= {n: (getattr(sae, n).detach(), 0, rank, tp) for n in ("dictionary", "threshold")}
    torch.save(state, os.path.join(sys.argv[sys.argv.index("--save") + 1], f"rank{rank}.pt"))
if tp > 1:
    dist.destroy_process_group()
