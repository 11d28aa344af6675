"""FSDP2 in the order of many tutorials: forward, loss, clear gradients, backward, step."""

import argparse
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.fsdp import fully_shard


class Mixer(nn.Module):
    """Causal mixing of tokens by a lower triangular matrix, then of channels."""

    def __init__(self, length, dim):
        super().__init__()
        self.tokens = nn.Parameter(torch.randn(length, length) / length)
        self.ln, self.channels = nn.LayerNorm(dim), nn.Linear(dim, dim)

    def forward(self, x):
        x = x + torch.einsum("ts,bsd->btd", self.tokens.tril(), x)
        return x + F.gelu(self.channels(self.ln(x)))


class Model(nn.Module):
    def __init__(self, vocab=58, dim=36, length=12):
        super().__init__()
        self.embed = nn.Embedding(vocab, dim)
        self.mixers = nn.ModuleList(Mixer(length, dim) for _ in range(2))
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, vocab)

    def forward(self, ids):
        x = self.embed(ids)
        for mixer in self.mixers:
            x = mixer(x)
        return self.head(self.norm(x))


def train(one: bool, faulty: bool, save: Path | None, steps: int = 4):
    rank, world = 0, 1
    if not one:
        dist.init_process_group("gloo")
        rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(301)
    model = Model()
    if not one:
        for mixer in model.mixers:
            fully_shard(mixer)
        fully_shard(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    for step in range(1, steps + 1):
        rows = torch.randint(0, 58, (8, 13), generator=torch.Generator().manual_seed(step))[rank::world]
        loss = F.cross_entropy(model(rows[:, :-1]).transpose(1, 2), rows[:, 1:])
        if faulty:
            model.zero_grad()
        else:
            optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        shown = loss.detach().clone()
        if not one:
            dist.all_reduce(shown)
        if rank == 0:
            print(f"step {step} loss {shown.item() / world:.7f}", flush=True)
    if save:
        state = {name: t if one else t.full_tensor() for name, t in model.state_dict().items()}
        torch.save(state, save / f"rank{rank}.pt")
    if not one:
        dist.destroy_process_group()


if __name__ == "__main__":
    cli = argparse.ArgumentParser()
    cli.add_argument("--one", action="store_true")
    cli.add_argument("--faulty", action="store_true")
    cli.add_argument("--save", type=Path)
    train(**vars(cli.parse_args()))
