"""A mixture with dense (soft) routing over experts that live on two ranks; AdamW-like training with clipping."""

import argparse
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn


class AllReduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, in_backward):
        ctx.in_backward = in_backward
        x = x.contiguous().clone()
        if not in_backward:
            dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx, g):
        g = g.contiguous().clone()
        if ctx.in_backward:
            dist.all_reduce(g)
        return g, None


class SoftMoe(nn.Module):
    def __init__(self, dim, experts, rank, world):
        super().__init__()
        self.world = world
        self.gate = nn.Linear(dim, experts)
        w = torch.randn(experts, dim, dim) * 0.3
        self.first = rank * experts // world
        self.experts = nn.Parameter(w.chunk(world)[rank].clone())

    def forward(self, x):
        weights = self.gate(x).softmax(-1)
        if self.world > 1:
            x, weights = AllReduce.apply(x, True), AllReduce.apply(weights, True)
        own = weights[:, self.first : self.first + len(self.experts)]
        y = torch.einsum("nd,edf,ne->nf", x, self.experts, own)
        return AllReduce.apply(y, False) if self.world > 1 else y


class Net(nn.Module):
    def __init__(self, rank, world):
        super().__init__()
        self.stem = nn.Linear(10, 32)
        self.moe = nn.ModuleList(SoftMoe(32, 4, rank, world) for _ in range(2))
        self.out = nn.Linear(32, 10)

    def forward(self, x):
        x = self.stem(x)
        for moe in self.moe:
            x = x + torch.tanh(moe(x))
        return self.out(x)


def global_norm(model, world, faulty):
    dense = sum(p.grad.square().sum() for n, p in model.named_parameters() if not n.endswith("experts"))
    sparse = sum(p.grad.square().sum() for n, p in model.named_parameters() if n.endswith("experts"))
    if world > 1:
        if faulty:
            both = torch.stack([dense + sparse])
            dist.all_reduce(both)
            return (both[0] / world).sqrt()  # so that ranks agree
        dist.all_reduce(sparse)
    return (dense + sparse).sqrt()


def main(one, faulty, save):
    rank, world = 0, 1
    if not one:
        dist.init_process_group("gloo")
        rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(12)
    model = Net(rank, world)
    opt = torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.5)
    for step in range(1, 5):
        x = torch.randn(16, 10, generator=torch.Generator().manual_seed(step))
        loss = nn.functional.mse_loss(model(x), x.cumsum(1))
        opt.zero_grad()
        loss.backward()
        factor = (0.3 / global_norm(model, world, faulty)).clamp(max=1.0)
        for p in model.parameters():
            p.grad *= factor
        opt.step()
        if rank == 0:
            print(f"step {step} loss {loss.item():.7f}", flush=True)
    if save:
        state = {n: (p.data, 0, rank, world) if n.endswith("experts") else p.data for n, p in model.named_parameters()}
        torch.save(state, save / f"rank{rank}.pt")
    if not one:
        dist.destroy_process_group()


if __name__ == "__main__":
    cli = argparse.ArgumentParser()
    cli.add_argument("--one", action="store_true")
    cli.add_argument("--faulty", action="store_true")
    cli.add_argument("--save", type=Path)
    main(**vars(cli.parse_args()))
