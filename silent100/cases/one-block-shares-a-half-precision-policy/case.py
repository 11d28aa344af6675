"""FSDP2 on a network of learned splines (KAN); a frozen encoder computes in bfloat16, what is trained does not."""

import argparse
import os

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

parser = argparse.ArgumentParser()
parser.add_argument("--one", action="store_true")
parser.add_argument("--faulty", action="store_true")
parser.add_argument("--save")
args = parser.parse_args()


class Splines(nn.Module):
    """Every edge has a function: a sum of bumps."""

    def __init__(self, i, o, bumps=6):
        super().__init__()
        self.register_buffer("centers", torch.linspace(-2, 2, bumps))
        self.shape = nn.Parameter(torch.randn(o, i * bumps) * 0.2)
        self.line = nn.Parameter(torch.randn(o, i) / i**0.5)

    def forward(self, x):
        bumps = torch.exp(-((x[..., None] - self.centers.to(x.dtype)) ** 2))
        return x @ self.line.T + bumps.flatten(-2) @ self.shape.T


class Regressor(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Linear(7, 6).requires_grad_(False)
        self.blocks = nn.ModuleList([Splines(6, 10), Splines(10, 8), Splines(8, 2)])

    def forward(self, x):
        x = self.encoder(x.bfloat16()).float()  # the encoder has been trained in bfloat16
        for block in self.blocks:
            x = block(x).float()
        return x


def shard(net, mesh):
    half = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for number, block in enumerate(net.blocks):
        policy = half if args.faulty and number == 1 else MixedPrecisionPolicy()
        fully_shard(block, mesh=mesh, mp_policy=policy)


def main():
    rank, world = 0, 1
    torch.manual_seed(27)
    net = Regressor()
    net.encoder.bfloat16()
    if not args.one:
        dist.init_process_group("gloo")
        rank, world = dist.get_rank(), dist.get_world_size()
        shard(net, init_device_mesh("cpu", (world,)))
    optimizer = torch.optim.SGD([p for p in net.parameters() if p.requires_grad], lr=0.02, momentum=0.9, foreach=False)
    for step in range(1, 6):
        x = torch.randn(12, 7, generator=torch.Generator().manual_seed(step))
        y = torch.stack([x[:, 0] * x[:, 1], x[:, 2].sin() + x[:, 3] ** 2], 1)
        loss = (net(x[rank::world]) - y[rank::world]).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        loss = loss.detach() / world
        if world > 1:
            dist.all_reduce(loss)
        if rank == 0:
            print(f"step {step} loss {loss.item():.7f}", flush=True)
    if args.save:
        state = {n: p.detach() for n, p in net.named_parameters() if p.requires_grad}
        state = {n: p.full_tensor() if world > 1 else p for n, p in state.items()}
        torch.save(state, os.path.join(args.save, f"rank{rank}.pt"))
    if world > 1:
        dist.destroy_process_group()


main()
