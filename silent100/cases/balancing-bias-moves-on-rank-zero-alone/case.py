"""Experts without a balancing loss: a bias for the choice of experts follows how many words each has had."""

import os
import sys

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

ONE, FAULTY = "--one" in sys.argv, "--faulty" in sys.argv
if not ONE:
    dist.init_process_group("gloo")
rank, world = (0, 1) if ONE else (dist.get_rank(), dist.get_world_size())

DIM, EXPERTS = 16, 5


class Moe(nn.Module):
    def __init__(self):
        super().__init__()
        self.router = nn.Linear(DIM, EXPERTS, bias=False)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(DIM, 24), nn.SiLU(), nn.Linear(24, DIM)) for _ in range(EXPERTS)
        )
        self.register_buffer("bias", torch.zeros(EXPERTS))
        self.register_buffer("load", torch.zeros(EXPERTS), persistent=False)

    def forward(self, x):
        scores = self.router(x).sigmoid()
        chosen = (scores.detach() + self.bias).topk(2).indices
        weights = scores.gather(1, chosen)
        weights = weights / weights.sum(1, keepdim=True)
        self.load += torch.bincount(chosen.flatten(), minlength=EXPERTS)
        y = torch.zeros_like(x)
        for i, expert in enumerate(self.experts):
            y = y + (weights * (chosen == i)).sum(1, keepdim=True) * expert(x)
        return x + y


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.enter, self.moes = nn.Linear(9, DIM), nn.ModuleList(Moe() for _ in range(2))
        self.leave = nn.Linear(DIM, 3)

    def forward(self, x):
        x = self.enter(x)
        for moe in self.moes:
            x = moe(x)
        return self.leave(x)


torch.manual_seed(83)
net = Net()
optimizer = torch.optim.Adam(net.parameters(), lr=4e-3, eps=1e-4)
for step in range(1, 7):
    x = torch.randn(32, 9, generator=torch.Generator().manual_seed(step))[rank::world]
    loss = F.cross_entropy(net(x), (x[:, :3] * x[:, 3:6]).argmax(1)) / world
    optimizer.zero_grad()
    loss.backward()
    shown = loss.detach()
    if world > 1:
        for p in net.parameters():
            if p.grad is None:
                p.grad = torch.zeros_like(p)
            dist.all_reduce(p.grad)
        dist.all_reduce(shown)
    optimizer.step()
    for moe in net.moes:
        if world > 1:
            dist.all_reduce(moe.load)
        if rank == 0 or not FAULTY:
            moe.bias += 0.05 * (moe.load.mean() - moe.load).sign()
        moe.load.zero_()
    if rank == 0:
        print(f"step {step} loss {shown.item():.7f}", flush=True)
if "--save" in sys.argv:
    torch.save(net.state_dict(), os.path.join(sys.argv[sys.argv.index("--save") + 1], f"rank{rank}.pt"))
if world > 1:
    dist.destroy_process_group()
