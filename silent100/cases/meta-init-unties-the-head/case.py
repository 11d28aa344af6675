"""Meta-device construction, materialized on every rank from rank 0's weights, then FSDP2."""

import argparse
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.fsdp import fully_shard


class Tied(nn.Module):
    def __init__(self, vocab=50, dim=32):
        super().__init__()
        self.embed = nn.Embedding(vocab, dim)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.RMSNorm(dim), nn.Linear(dim, 64), nn.SiLU(), nn.Linear(64, dim)) for _ in range(2)
        )
        self.head = nn.Linear(dim, vocab, bias=False)
        self.tie()

    def tie(self):
        self.head.weight = self.embed.weight

    def forward(self, ids):
        x = self.embed(ids)
        for layer in self.layers:
            x = x + layer(x)
        return self.head(x)


def materialize(args):
    torch.manual_seed(9)
    full = Tied()
    with torch.no_grad():
        full.embed.weight.mul_(0.3)
    if args.one:
        return full
    with torch.device("meta"):
        model = Tied()
    model.to_empty(device="cpu")
    model.load_state_dict(full.state_dict())
    if not args.faulty:
        model.tie()
    for layer in model.layers:
        fully_shard(layer)
    return fully_shard(model)


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
    model = materialize(args)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    for step in range(1, 5):
        rows = torch.randint(0, 50, (8, 10), generator=torch.Generator().manual_seed(step))[rank::world]
        loss = F.cross_entropy(model(rows[:, :-1]).transpose(1, 2), rows[:, 1:])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        shown = loss.detach().clone()
        if world > 1:
            dist.all_reduce(shown)
        if rank == 0:
            print(f"step {step} loss {shown.item() / world:.7f}", flush=True)
    if args.save:
        state = {k: v if args.one else v.full_tensor() for k, v in model.state_dict().items()}
        torch.save(state, os.path.join(args.save, f"rank{rank}.pt"))
    if world > 1:
        dist.destroy_process_group()


main()
