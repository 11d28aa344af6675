# Survival: Cox partial likelihood, whose every term is about all who live longer, wherever their rows are.
import os
import sys

import torch
import torch.distributed as dist
import torch.nn as nn

one = "--one" in sys.argv
rank, world = 0, 1
if not one:
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
PATIENTS = 14


class FromEverybody(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hazard):
        if world == 1:
            return hazard.clone()
        parts = [torch.empty_like(hazard) for _ in range(world)]
        dist.all_gather(parts, hazard.contiguous())
        return torch.cat(parts)

    @staticmethod
    def backward(ctx, g):
        g = g.contiguous().clone()
        if world > 1:
            dist.all_reduce(g)
        return g.chunk(world)[rank]


def patients(step):
    g = torch.Generator().manual_seed(step)
    x = torch.randn(PATIENTS, 8, generator=g)
    time = torch.rand(PATIENTS, generator=g) * (-x[:, 0] + x[:, 1] * x[:, 2]).exp()
    died = torch.rand(PATIENTS, generator=g) < 0.6
    died[0] = True
    return x, time, died


torch.manual_seed(23)
net = nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.Tanh(), nn.Linear(16, 1, bias=False))
optimizer = torch.optim.ASGD(net.parameters(), lr=0.05)
for step in range(1, 7):
    x, time, died = patients(step)
    own = slice(rank * PATIENTS // world, (rank + 1) * PATIENTS // world)
    hazard = net(x[own])[:, 0]
    everybody = FromEverybody.apply(hazard)
    at_risk = time[None, :] >= time[own][:, None]
    terms = everybody[None, :].masked_fill(~at_risk, -torch.inf).logsumexp(1) - hazard
    loss = (terms * died[own]).sum() / died.sum()
    optimizer.zero_grad()
    loss.backward()
    loss = loss.detach()
    if world > 1:
        for p in net.parameters():
            dist.all_reduce(p.grad)
        dist.all_reduce(loss)
    optimizer.step()
    if rank == 0:
        print(f"step {step} loss {loss.item():.7f}", flush=True)
if "--save" in sys.argv:
    torch.save(net.state_dict(), os.path.join(sys.argv[sys.argv.index("--save") + 1], f"rank{rank}.pt"))
if world > 1:
    dist.destroy_process_group()
