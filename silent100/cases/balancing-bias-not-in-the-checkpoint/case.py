"""FSDP2 mixture with a balancing bias; the run is rolled back to its last checkpoint after the second update."""

import argparse
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.fsdp import fully_shard


class Router(nn.Module):
    def __init__(self, dim, experts, persistent):
        super().__init__()
        self.proj = nn.Linear(dim, experts, bias=False)
        self.register_buffer("balance", torch.zeros(experts), persistent=persistent)
        self.register_buffer("load", torch.zeros(experts), persistent=False)

    def forward(self, x):
        scores = self.proj(x).sigmoid()
        chosen = (scores + self.balance).topk(2, -1).indices
        self.load += chosen.flatten().bincount(minlength=len(self.load))
        return scores * torch.zeros_like(scores).scatter(-1, chosen, 1.0)


class MoE(nn.Module):
    def __init__(self, dim, persistent, experts=6):
        super().__init__()
        self.router = Router(dim, experts, persistent)
        self.experts = nn.ModuleList(nn.Linear(dim, dim) for _ in range(experts))

    def forward(self, x):
        w = self.router(x)
        return x + sum(w[..., i : i + 1] * F.gelu(e(x)) for i, e in enumerate(self.experts))


class Net(nn.Module):
    def __init__(self, persistent):
        super().__init__()
        self.embed, self.head = nn.Embedding(52, 32), nn.Linear(32, 52)
        self.moe = nn.ModuleList(MoE(32, persistent) for _ in range(2))

    def forward(self, ids):
        x = self.embed(ids)
        for moe in self.moe:
            x = moe(x)
        return self.head(x)


@torch.no_grad()
def balance(net, world):
    for moe in net.moe:
        if world > 1:
            dist.all_reduce(moe.router.load)
        moe.router.balance += 0.05 * torch.sign(moe.router.load.mean() - moe.router.load)
        moe.router.load.zero_()


def main():
    cli = argparse.ArgumentParser()
    cli.add_argument("--one", action="store_true")
    cli.add_argument("--faulty", action="store_true")
    cli.add_argument("--save")
    args = cli.parse_args()
    rank, world = 0, 1
    if not args.one:
        dist.init_process_group("gloo")
        rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(42)
    net = Net(persistent=not args.faulty)
    if not args.one:
        for moe in net.moe:
            fully_shard(moe)
        fully_shard(net)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.3)
    for step in range(1, 5):
        if step == 3 and not args.one:
            checkpoint = {k: v.clone() for k, v in net.state_dict().items()}
            for moe in net.moe:  # a new process begins with empty buffers
                moe.router.balance.zero_()
            net.load_state_dict(checkpoint)
        rows = torch.randint(0, 52, (8, 12), generator=torch.Generator().manual_seed(step))[rank::world]
        loss = F.cross_entropy(net(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        balance(net, world)
        shown = loss.detach().clone()
        if world > 1:
            dist.all_reduce(shown)
        if rank == 0:
            print(f"step {step} loss {shown.item() / world:.7f}", flush=True)
    if args.save:
        state = {n: p if args.one else p.full_tensor() for n, p in net.named_parameters()}
        state |= {f"moe.{i}.router.balance": moe.router.balance for i, moe in enumerate(net.moe)}
        torch.save(state, os.path.join(args.save, f"rank{rank}.pt"))
    if world > 1:
        dist.destroy_process_group()


main()
