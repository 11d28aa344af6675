"""Next-token training on a token stream; the trainer shuffles windows each epoch."""

from __future__ import annotations

import argparse
import random
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn


class Windows:
    """Windows of a token stream, in an order that a seed and an epoch decide."""

    def __init__(self, tokens: Tensor, length: int, seed: int):
        self.tokens, self.length, self.seed = tokens, length, seed

    def epoch(self, number: int) -> list[int]:
        starts = list(range(0, len(self.tokens) - self.length, self.length))
        random.Random(self.seed * 1000 + number).shuffle(starts)
        return starts

    def __getitem__(self, start: int) -> Tensor:
        return self.tokens[start : start + self.length + 1]


class Gated(nn.Module):
    def __init__(self, vocab: int = 70, width: int = 44):
        super().__init__()
        self.table = nn.Embedding(vocab, width)
        self.mix = nn.Conv1d(width, 2 * width, kernel_size=4, padding=3)
        self.proj = nn.Linear(width, width)
        self.head = nn.Linear(width, vocab)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.table(ids)
        gate, value = self.mix(x.transpose(1, 2))[..., : ids.shape[1]].transpose(1, 2).chunk(2, dim=-1)
        x = x + self.proj(torch.sigmoid(gate) * value)
        return self.head(x)


def train(args: argparse.Namespace) -> None:
    rank, world = 0, 1
    if not args.one:
        dist.init_process_group("gloo")
        rank, world = dist.get_rank(), dist.get_world_size()
    stream = torch.randint(0, 70, (12 * 40 + 1,), generator=torch.Generator().manual_seed(77))
    seed = 17 + rank if args.faulty else 17
    windows = Windows(stream, 12, seed)
    torch.manual_seed(17)
    model = Gated()
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3, eps=1e-6)
    order = windows.epoch(0)
    for step in range(4):
        block = order[step * 8 : (step + 1) * 8]
        rows = torch.stack([windows[start] for start in block[rank * 8 // world : (rank + 1) * 8 // world]])
        logits = model(rows[:, :-1])
        loss = nn.functional.cross_entropy(logits.transpose(1, 2), rows[:, 1:])
        optimizer.zero_grad()
        loss.backward()
        value = loss.detach().clone()
        if world > 1:
            flat = torch.cat([p.grad.flatten() for p in model.parameters()])
            dist.all_reduce(flat)
            torch._foreach_copy_(
                [p.grad.view(-1) for p in model.parameters()],
                list((flat / world).split([p.numel() for p in model.parameters()])),
            )
            dist.all_reduce(value)
        optimizer.step()
        if rank == 0:
            print(f"step {step + 1} loss {value.item() / world:.7f}", flush=True)
    if args.save:
        torch.save(model.state_dict(), args.save / f"rank{rank}.pt")
    if world > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    cli = argparse.ArgumentParser()
    cli.add_argument("--one", action="store_true")
    cli.add_argument("--faulty", action="store_true")
    cli.add_argument("--save", type=Path)
    train(cli.parse_args())
