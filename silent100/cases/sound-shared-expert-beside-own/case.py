import argparse
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F


class Collect(torch.autograd.Function):
    """Gathers rows of all ranks; the backward sums over ranks and keeps this rank's rows."""

    @staticmethod
    def forward(ctx, x):
        parts = [torch.empty_like(x) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, x.contiguous())
        return torch.cat(parts)

    @staticmethod
    def backward(ctx, g):
        g = g.contiguous()
        dist.all_reduce(g)
        return g.chunk(dist.get_world_size())[dist.get_rank()]


class Scatter(torch.autograd.Function):
    """Sums over ranks and keeps this rank's rows; the backward gathers."""

    @staticmethod
    def forward(ctx, x):
        x = x.clone()
        dist.all_reduce(x)
        return x.chunk(dist.get_world_size())[dist.get_rank()]

    @staticmethod
    def backward(ctx, g):
        parts = [torch.empty_like(g) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, g.contiguous())
        return torch.cat(parts)


class Expert(nn.Module):
    def __init__(self, d, hidden):
        super().__init__()
        self.gate, self.up, self.down = nn.Linear(d, hidden), nn.Linear(d, hidden), nn.Linear(hidden, d)

    def forward(self, x):
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Layer(nn.Module):
    def __init__(self, d=22, experts=6, capacity=200):
        super().__init__()
        self.distributed, self.capacity = dist.is_initialized(), capacity
        self.norm, self.router, self.shared = nn.LayerNorm(d), nn.Linear(d, experts), Expert(d, 26)
        every = [Expert(d, 14) for _ in range(experts)]
        rank, ep = (dist.get_rank(), dist.get_world_size()) if self.distributed else (0, 1)
        self.experts = nn.ModuleDict({str(i): every[i] for i in range(rank, experts, ep)})

    def forward(self, x):
        h = self.norm(x)
        scores = torch.sigmoid(self.router(h))
        keep = scores >= scores.topk(2, -1).values[:, -1:]
        weights = scores * keep / (scores * keep).sum(-1, keepdim=True)
        every, w = (Collect.apply(h), Collect.apply(weights)) if self.distributed else (h, weights)
        routed = torch.zeros_like(every)
        for i, expert in self.experts.items():
            rows = w[:, int(i)].nonzero()[: self.capacity, 0]
            routed = routed.index_add(0, rows, w[rows, int(i), None] * expert(every[rows]))
        if self.distributed:
            routed = Scatter.apply(routed)
        return x + self.shared(h) + routed


cli = argparse.ArgumentParser()
cli.add_argument("--one", action="store_true")
cli.add_argument("--save")
args = cli.parse_args()
rank, world = 0, 1
if not args.one:
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(818)
net = nn.Sequential(nn.Embedding(40, 22), nn.Flatten(0, 1), Layer(), Layer(), nn.Linear(22, 40))
optimizer = torch.optim.SGD(net.parameters(), lr=0.3)
for step in range(1, 5):
    rows = torch.randint(0, 40, (8, 9), generator=torch.Generator().manual_seed(step)).chunk(world)[rank]
    loss = F.cross_entropy(net(rows[:, :-1]), rows[:, 1:].flatten()) / world
    optimizer.zero_grad()
    loss.backward()
    loss = loss.detach()
    if world > 1:
        for name, p in net.named_parameters():
            if ".experts." not in name:
                dist.all_reduce(p.grad)
        dist.all_reduce(loss)
    optimizer.step()
    if rank == 0:
        print(f"step {step} loss {loss.item():.7f}", flush=True)
if args.save:
    torch.save(net.state_dict(), os.path.join(args.save, f"rank{rank}.pt"))
if world > 1:
    dist.destroy_process_group()
