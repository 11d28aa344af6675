"""Low-rank adapters on a frozen FSDP2 model; half of the adapters have zero gradients in the first update."""

import argparse
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.fsdp import fully_shard


class Lora(nn.Module):
    def __init__(self, base, rank=4):
        super().__init__()
        self.base = base.requires_grad_(False)
        self.a = nn.Parameter(torch.randn(rank, base.in_features) * 0.2)
        self.b = nn.Parameter(torch.zeros(base.out_features, rank))

    def forward(self, x):
        return self.base(x) + F.linear(F.linear(x, self.a), self.b)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(58, 32).requires_grad_(False)
        self.layers = nn.ModuleList(
            nn.Sequential(
                nn.LayerNorm(32).requires_grad_(False), Lora(nn.Linear(32, 64)), nn.GELU(), Lora(nn.Linear(64, 32))
            )
            for _ in range(2)
        )
        self.head = nn.Linear(32, 58).requires_grad_(False)

    def forward(self, ids):
        x = self.embed(ids)
        for layer in self.layers:
            x = x + layer(x)
        return self.head(x)


def main():
    cli = argparse.ArgumentParser()
    cli.add_argument("--one", action="store_true")
    cli.add_argument("--save")
    args = cli.parse_args()
    rank, world = 0, 1
    if not args.one:
        dist.init_process_group("gloo")
        rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(1)
    net = Net()
    if not args.one:
        for layer in net.layers:
            fully_shard(layer)
        fully_shard(net)
    optimizer = torch.optim.SGD([p for p in net.parameters() if p.requires_grad], lr=0.5, momentum=0.9)
    for step in range(1, 5):
        rows = torch.randint(0, 58, (8, 10), generator=torch.Generator().manual_seed(step))[rank::world]
        loss = F.cross_entropy(net(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        shown = loss.detach().clone()
        if world > 1:
            dist.all_reduce(shown)
        if rank == 0:
            print(f"step {step} loss {shown.item() / world:.7f}", flush=True)
    if args.save:
        state = {k: v if args.one else v.full_tensor() for k, v in net.state_dict().items()}
        torch.save(state, os.path.join(args.save, f"rank{rank}.pt"))
    if world > 1:
        dist.destroy_process_group()


main()
