"""A product of Gaussian experts, one on each rank: every expert says a mean and how certain it is."""

import argparse
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

parse = argparse.ArgumentParser()
parse.add_argument("--one", action="store_true")
parse.add_argument("--faulty", action="store_true")
parse.add_argument("--save")
ns = parse.parse_args()
if ns.one:
    rank, mine = 0, [0, 1, 2]
else:
    dist.init_process_group("gloo")
    rank, mine = dist.get_rank(), [dist.get_rank()]


class Pool(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        x = x.clone()
        if not ns.one:
            dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx, g):
        return g


class Expert(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 18), nn.Softplus())
        self.mean, self.certainty = nn.Linear(18, 2), nn.Linear(18, 2)

    def forward(self, x):
        h = self.body(x)
        return self.mean(h), F.softplus(self.certainty(h))


class Committee(nn.Module):
    def __init__(self):
        super().__init__()
        every = [Expert() for _ in range(3)]
        self.experts = nn.ModuleDict({str(i): every[i] for i in mine})

    def forward(self, x):
        said = [expert(x) for expert in self.experts.values()]
        weighed = Pool.apply(sum(m * c for m, c in said))
        certainty = sum(c for _, c in said)
        if ns.faulty:
            certainty = certainty.detach().clone()
            dist.all_reduce(certainty)
        else:
            certainty = Pool.apply(certainty)
        return weighed / (certainty + 0.1), certainty + 0.1


torch.manual_seed(1)
committee = Committee()
optimizer = torch.optim.SGD(committee.parameters(), lr=0.03, momentum=0.9)
for step in range(1, 7):
    x = torch.randn(16, 6, generator=torch.Generator().manual_seed(step))
    y = torch.stack([x[:, 0] * x[:, 1], x[:, 2:].amax(1)], 1)
    mean, certainty = committee(x)
    loss = (0.5 * certainty * (y - mean) ** 2 - 0.5 * certainty.log()).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if rank == 0:
        print(f"step {step} loss {loss.item():.7f}", flush=True)
if ns.save:
    torch.save(committee.state_dict(), os.path.join(ns.save, f"rank{rank}.pt"))
if not ns.one:
    dist.destroy_process_group()
