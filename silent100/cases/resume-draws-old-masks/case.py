"""Dropout whose masks do not depend on the number of ranks: drawn for the global batch, cut by rows."""

import argparse
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F


class GlobalDropout(nn.Module):
    """Draws a mask for all rows of the global batch and applies this rank's part."""

    def __init__(self, p, rank, world):
        super().__init__()
        self.p, self.rank, self.world = p, rank, world

    def forward(self, x):
        keep = torch.rand(x.shape[0] * self.world, *x.shape[1:]) >= self.p
        return x * keep[self.rank :: self.world] / (1 - self.p)


class Mlp(nn.Module):
    def __init__(self, rank, world):
        super().__init__()
        self.embed = nn.Embedding(50, 32)
        self.drop1, self.drop2 = GlobalDropout(0.1, rank, world), GlobalDropout(0.2, rank, world)
        self.fc1, self.fc2 = nn.Linear(32, 96), nn.Linear(96, 32)
        self.head = nn.Linear(32, 50)

    def forward(self, ids):
        x = self.drop1(self.embed(ids))
        x = x + self.drop2(self.fc2(F.gelu(self.fc1(x))))
        return self.head(x)


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
    torch.manual_seed(19)
    model = Mlp(rank, world)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)
    torch.manual_seed(20)
    for step in range(1, 6):
        if step == 3 and not args.one:
            checkpoint = {
                "model": {k: v.clone() for k, v in model.state_dict().items()},
                "optimizer": optimizer.state_dict(),
                "rng": torch.get_rng_state(),
            }
            torch.manual_seed(20)  # the new process
            model.load_state_dict(checkpoint["model"])
            optimizer.load_state_dict(checkpoint["optimizer"])
            if not args.faulty:
                torch.set_rng_state(checkpoint["rng"])
        rows = torch.randint(0, 50, (8, 9), generator=torch.Generator().manual_seed(step))[rank::world]
        loss = F.cross_entropy(model(rows[:, :-1]).transpose(1, 2), rows[:, 1:])
        optimizer.zero_grad()
        loss.backward()
        shown = loss.detach().clone()
        if world > 1:
            for p in model.parameters():
                dist.all_reduce(p.grad)
                p.grad /= world
            dist.all_reduce(shown)
        optimizer.step()
        if rank == 0:
            print(f"step {step} loss {shown.item() / world:.7f}", flush=True)
    if args.save:
        torch.save(model.state_dict(), os.path.join(args.save, f"rank{rank}.pt"))
    if world > 1:
        dist.destroy_process_group()


main()
