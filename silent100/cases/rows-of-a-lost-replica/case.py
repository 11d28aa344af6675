"""Fault-tolerant data parallelism in miniature: replica 1 is gone from the third update on."""

import argparse
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

LEAVES_AT = 3


class Quorum:
    """Who takes part in an update."""

    def __init__(self, world):
        self.world = world

    def members(self, step):
        return list(range(self.world if step < LEAVES_AT else 1))


class Mixer(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(66, 32)
        self.time, self.channel = nn.Linear(10, 10), nn.Linear(32, 32)
        self.norm, self.head = nn.LayerNorm(32), nn.Linear(32, 66)

    def forward(self, ids):
        x = self.embed(ids)
        weight = self.time.weight.tril()
        x = x + F.linear(x.mT, weight, self.time.bias).mT
        x = x + F.gelu(self.channel(self.norm(x)))
        return self.head(x)


def rows_of(batch, rank, members, fixed_world):
    world = fixed_world if fixed_world else len(members)
    return batch[members.index(rank) :: world]


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
    torch.manual_seed(23)
    model = Mixer()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    quorum = Quorum(world)
    for step in range(1, 6):
        members = quorum.members(step)
        if rank not in members:
            break
        batch = torch.randint(0, 66, (12, 11), generator=torch.Generator().manual_seed(step))
        rows = rows_of(batch, rank, members, world if args.faulty else 0)
        loss = F.cross_entropy(model(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        loss = loss.detach()
        if len(members) > 1:
            for p in model.parameters():
                dist.all_reduce(p.grad)
                p.grad /= len(members)
            dist.all_reduce(loss)
            loss /= len(members)
        optimizer.step()
        if rank == 0:
            print(f"step {step} loss {loss.item():.7f}", flush=True)
    if args.save and rank == 0:
        torch.save(model.state_dict(), os.path.join(args.save, "rank0.pt"))
    if not args.one:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
