"""FSDP2 with gradient accumulation; gradients travel once per update."""

import argparse
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.fsdp import fully_shard


def build():
    torch.manual_seed(2)
    encoder = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True, norm_first=True)
    return nn.ModuleDict(
        {
            "embed": nn.Embedding(55, 32),
            "encoder": nn.TransformerEncoder(encoder, 3, enable_nested_tensor=False),
            "head": nn.Linear(32, 55),
        }
    )


class Wrapper(nn.Module):
    def __init__(self, parts):
        super().__init__()
        self.parts = parts

    def forward(self, ids):
        mask = nn.Transformer.generate_square_subsequent_mask(ids.shape[1])
        return self.parts["head"](self.parts["encoder"](self.parts["embed"](ids), mask=mask))


def main(one: bool, faulty: bool, save: Path | None, accumulate: int = 2):
    rank, world = 0, 1
    if not one:
        dist.init_process_group("gloo")
        rank, world = dist.get_rank(), dist.get_world_size()
    model = Wrapper(build())
    if not one:
        for layer in model.parts["encoder"].layers:
            fully_shard(layer)
        fully_shard(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    for step in range(1, 4):
        ids = torch.randint(0, 55, (16, 10), generator=torch.Generator().manual_seed(40 + step))
        total = torch.zeros(())
        for index, rows in enumerate(ids[rank::world].chunk(accumulate)):
            if not one:
                model.set_requires_gradient_sync(index == (0 if faulty else accumulate - 1))
            loss = F.cross_entropy(model(rows[:, :-1]).transpose(1, 2), rows[:, 1:]) / accumulate
            loss.backward()
            total += loss.detach()
        optimizer.step()
        optimizer.zero_grad()
        if not one:
            dist.all_reduce(total)
        if rank == 0:
            print(f"step {step} loss {total.item() / world:.7f}", flush=True)
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
    main(**vars(cli.parse_args()))
