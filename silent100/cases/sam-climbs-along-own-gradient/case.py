"""A small residual network trained with sharpness-aware minimization; the whole batch decides the ascent."""

import os
import sys
from contextlib import nullcontext

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP


class SAM(torch.optim.Optimizer):
    def __init__(self, params, rho=0.1, **kwargs):
        super().__init__(params, {"rho": rho, **kwargs})
        self.base = torch.optim.SGD(self.param_groups, **kwargs)
        self.param_groups = self.base.param_groups

    @torch.no_grad()
    def climb(self):
        every = [p for g in self.param_groups for p in g["params"]]
        norm = torch.stack([p.grad.norm() for p in every]).norm()
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p]["old"] = p.clone()
                p.add_(p.grad * (group["rho"] / (norm + 1e-12)))
        self.zero_grad()

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                p.copy_(self.state[p].pop("old"))
        self.base.step()
        self.zero_grad()


class Residual(nn.Module):
    def __init__(self, n):
        super().__init__()
        self.a, self.b = nn.Conv2d(n, n, 3, padding=1), nn.Conv2d(n, n, 3, padding=1)
        self.na, self.nb = nn.GroupNorm(2, n), nn.GroupNorm(2, n)

    def forward(self, x):
        return F.relu(x + self.nb(self.b(F.relu(self.na(self.a(x))))))


if __name__ == "__main__":
    alone, broken = "--one" in sys.argv, "--faulty" in sys.argv
    rank, world = 0, 1
    if not alone:
        dist.init_process_group("gloo")
        rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(2)
    net = nn.Sequential(nn.Conv2d(1, 8, 3, 2, 1), Residual(8), nn.AvgPool2d(4), nn.Flatten(), nn.Linear(8, 4))
    model = net if alone else DDP(net)
    opt = SAM(model.parameters(), rho=0.1, lr=0.1, momentum=0.9)
    for step in range(1, 6):
        g = torch.Generator().manual_seed(step)
        x, y = torch.randn(8, 1, 8, 8, generator=g)[rank::world], torch.randint(4, (8,), generator=g)[rank::world]
        with model.no_sync() if broken else nullcontext():
            loss = F.cross_entropy(model(x), y)
            loss.backward()
        opt.climb()
        F.cross_entropy(model(x), y).backward()
        opt.step()
        loss = loss.detach().clone()
        if not alone:
            dist.all_reduce(loss)
        if rank == 0:
            print(f"step {step} loss {loss.item() / world:.7f}", flush=True)
    if "--save" in sys.argv:
        torch.save(net.state_dict(), os.path.join(sys.argv[sys.argv.index("--save") + 1], f"rank{rank}.pt"))
    if not alone:
        dist.destroy_process_group()
