"""Checkpointed blocks with dropout; all ranks draw masks of the global batch and use their rows."""

import argparse
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

RANK, WORLD = 0, 1


class RowDropout(nn.Module):
    def __init__(self, p):
        super().__init__()
        self.p = p

    def forward(self, x):
        mask = torch.rand(len(x) * WORLD, *x.shape[1:]) >= self.p
        return x * mask[RANK::WORLD] / (1 - self.p)


class Block(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.norm, self.conv = nn.LayerNorm(dim), nn.Conv1d(dim, dim, 3)
        self.mlp = nn.Sequential(nn.Linear(dim, 2 * dim), nn.GELU(), RowDropout(0.2), nn.Linear(2 * dim, dim))

    def forward(self, x):
        h = F.pad(self.norm(x).mT, (2, 0))
        return x + self.mlp(self.conv(h).mT)


class Model(nn.Module):
    def __init__(self, keep, dim=32, vocab=53):
        super().__init__()
        self.keep = keep
        self.embed, self.head = nn.Embedding(vocab, dim), nn.Linear(dim, vocab)
        self.blocks = nn.ModuleList(Block(dim) for _ in range(2))

    def forward(self, ids):
        x = self.embed(ids)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False, preserve_rng_state=self.keep)
        return self.head(x)


def main():
    global RANK, WORLD
    cli = argparse.ArgumentParser()
    cli.add_argument("--one", action="store_true")
    cli.add_argument("--faulty", action="store_true")
    cli.add_argument("--save")
    args = cli.parse_args()
    if not args.one:
        dist.init_process_group("gloo")
        RANK, WORLD = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(60)
    model = Model(keep=not args.faulty)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    for step in range(1, 4):
        torch.manual_seed(1000 + step)
        rows = torch.randint(0, 53, (8, 10), generator=torch.Generator().manual_seed(step))[RANK::WORLD]
        loss = F.cross_entropy(model(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        shown = loss.detach().clone()
        if WORLD > 1:
            for p in model.parameters():
                dist.all_reduce(p.grad)
                p.grad /= WORLD
            dist.all_reduce(shown)
        optimizer.step()
        if RANK == 0:
            print(f"step {step} loss {shown.item() / WORLD:.7f}", flush=True)
    if args.save:
        torch.save(model.state_dict(), os.path.join(args.save, f"rank{RANK}.pt"))
    if WORLD > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
