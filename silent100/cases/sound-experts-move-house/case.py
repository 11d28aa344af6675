"""Rebalancing: after three updates ranks exchange experts, together with what the optimizer knows of them."""

import argparse
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

cli = argparse.ArgumentParser()
cli.add_argument("--one", action="store_true")
cli.add_argument("--save")
args = cli.parse_args()
rank, ep = 0, 1
if not args.one:
    dist.init_process_group("gloo")
    rank, ep = dist.get_rank(), dist.get_world_size()
D, EXPERTS = 20, 4


class Combine(torch.autograd.Function):
    """Sums over ranks, in forward or in backward."""

    @staticmethod
    def forward(ctx, x, forward):
        ctx.forward_too = forward
        x = x.clone()
        if forward and ep > 1:
            dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx, g):
        g = g.clone()
        if not ctx.forward_too and ep > 1:
            dist.all_reduce(g)
        return g, None


class Moe(nn.Module):
    def __init__(self, homes):
        super().__init__()
        self.gate = nn.Linear(D, EXPERTS)
        every = torch.randn(EXPERTS, D, D) * 0.2
        self.experts = nn.ParameterDict({str(i): every[i].clone() for i in homes})

    def forward(self, x):
        weights = self.gate(x).softmax(-1)
        inside, weights = Combine.apply(x, False), Combine.apply(weights, False)
        y = sum(weights[:, int(i), None] * torch.tanh(inside @ w) for i, w in self.experts.items())
        return x + Combine.apply(y, True)


def exchange(moe, optimizer, mine, theirs):
    """Swaps one expert for another rank's; its number is the same on both and so is its momentum."""
    old = moe.experts.pop(str(mine))
    packed = torch.stack([old.detach(), optimizer.state.pop(old)["momentum_buffer"]])
    got = torch.empty_like(packed)
    works = [dist.isend(packed, 1 - rank), dist.irecv(got, 1 - rank)]
    for work in works:
        work.wait()
    new = moe.experts[str(theirs)] = nn.Parameter(got[0].clone())
    optimizer.state[new]["momentum_buffer"] = got[1].clone()
    group = optimizer.param_groups[0]
    group["params"] = [p for p in group["params"] if p is not old] + [new]


torch.manual_seed(59)
homes = range(EXPERTS) if args.one else (2 * rank, 2 * rank + 1)
net = nn.Sequential(nn.Linear(9, D), Moe(homes), Moe(homes), nn.Linear(D, 9))
optimizer = torch.optim.SGD(net.parameters(), lr=0.3, momentum=0.9)
for step in range(1, 7):
    if step == 4 and ep > 1:
        for moe in (net[1], net[2]):
            exchange(moe, optimizer, 1 if rank == 0 else 2, 2 if rank == 0 else 1)
    x = torch.randn(20, 9, generator=torch.Generator().manual_seed(step))
    loss = F.mse_loss(net(x), x.flip(1))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if rank == 0:
        print(f"step {step} loss {loss.item():.7f}", flush=True)
if args.save:
    torch.save({n: p.detach() for n, p in net.named_parameters()}, os.path.join(args.save, f"rank{rank}.pt"))
if ep > 1:
    dist.destroy_process_group()
