"""Hybrid sharded data parallel: two replicas of a model that is sharded over two ranks."""

import argparse
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor


class FeedForward(nn.Module):
    def __init__(self, dim, hidden):
        super().__init__()
        self.w1 = nn.Linear(dim, hidden, bias=False)
        self.w2 = nn.Linear(hidden, dim, bias=False)
        self.w3 = nn.Linear(dim, hidden, bias=False)
        self.norm = nn.RMSNorm(dim)

    def forward(self, x):
        h = self.norm(x)
        return x + self.w2(F.silu(self.w1(h)) * self.w3(h))


class Model(nn.Module):
    def __init__(self, vocab=96, dim=32):
        super().__init__()
        self.embed = nn.Embedding(vocab, dim)
        self.conv = nn.Conv1d(dim, dim, 3, padding=2)
        self.layers = nn.ModuleList(FeedForward(dim, 64) for _ in range(3))
        self.head = nn.Linear(dim, vocab, bias=False)

    def forward(self, ids):
        x = self.embed(ids)
        x = x + self.conv(x.mT)[..., : ids.shape[1]].mT
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def shard(model, faulty):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    divisor = mesh["shard"].size() if faulty else dist.get_world_size()
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)
            module.set_gradient_divide_factor(float(divisor))


def main(args):
    rank, world = 0, 1
    if not args.one:
        dist.init_process_group("gloo")
        rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(8)
    model = Model()
    if not args.one:
        shard(model, args.faulty)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    for step in range(1, 4):
        ids = torch.randint(0, 96, (8, 11), generator=torch.Generator().manual_seed(step))[rank::world]
        loss = F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        shown = loss.detach().clone()
        if not args.one:
            dist.all_reduce(shown, op=dist.ReduceOp.SUM)
        if rank == 0:
            print(f"step {step} loss {shown.item() / world:.7f}", flush=True)
    if args.save:
        whole = {n: p.full_tensor() if isinstance(p, DTensor) else p for n, p in model.state_dict().items()}
        torch.save(whole, os.path.join(args.save, f"rank{rank}.pt"))
    if not args.one:
        dist.destroy_process_group()


if __name__ == "__main__":
    cli = argparse.ArgumentParser()
    cli.add_argument("--one", action="store_true")
    cli.add_argument("--faulty", action="store_true")
    cli.add_argument("--save")
    main(cli.parse_args())
