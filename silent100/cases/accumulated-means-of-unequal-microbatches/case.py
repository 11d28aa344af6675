"""A trainer class in the manner of many fine-tuning scripts: DDP, padding, gradient accumulation."""

import argparse
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

PAD = 0


@dataclass
class Settings:
    vocab: int = 64
    hidden: int = 32
    heads: int = 2
    rows_per_update: int = 16
    accumulation: int = 4
    updates: int = 3
    lr: float = 0.05


class Encoder(nn.Module):
    def __init__(self, s: Settings):
        super().__init__()
        self.words = nn.Embedding(s.vocab, s.hidden, padding_idx=PAD)
        layer = nn.TransformerEncoderLayer(
            s.hidden, s.heads, 4 * s.hidden, dropout=0.0, batch_first=True, norm_first=True
        )
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.decode = nn.Linear(s.hidden, s.vocab)

    def forward(self, ids):
        mask = nn.Transformer.generate_square_subsequent_mask(ids.shape[1])
        return self.decode(self.encoder(self.words(ids), mask=mask, is_causal=True))


class Trainer:
    def __init__(self, settings: Settings, one: bool, faulty: bool):
        self.s, self.one, self.faulty = settings, one, faulty
        self.rank, self.world = (0, 1) if one else (dist.get_rank(), dist.get_world_size())
        torch.manual_seed(11)
        self.model = Encoder(settings)
        self.wrapped = self.model if one else DistributedDataParallel(self.model)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=settings.lr, momentum=0.9)

    def batch(self, update):
        g = torch.Generator().manual_seed(update)
        ids = torch.randint(1, self.s.vocab, (self.s.rows_per_update, 13), generator=g)
        lengths = torch.randint(3, 14, (self.s.rows_per_update,), generator=g)
        return ids.masked_fill(torch.arange(13) >= lengths[:, None], PAD)

    def microbatches(self, rows):
        return rows[self.rank :: self.world].chunk(self.s.accumulation)

    def update(self, number):
        parts = self.microbatches(self.batch(number))
        items = torch.tensor(float(sum((part[:, 1:] != PAD).sum() for part in parts)))
        if not self.one:
            dist.all_reduce(items)
        logged = torch.zeros(())
        for i, part in enumerate(parts):
            if not self.one:
                self.wrapped.require_backward_grad_sync = i == len(parts) - 1
            logits = self.wrapped(part[:, :-1]).flatten(0, 1)
            summed = F.cross_entropy(logits, part[:, 1:].flatten(), ignore_index=PAD, reduction="sum")
            if self.faulty:
                loss = summed / (part[:, 1:] != PAD).sum() / len(parts)
            else:
                loss = summed * self.world / items
            loss.backward()
            logged += summed.detach() / items
        self.optimizer.step()
        self.optimizer.zero_grad()
        if not self.one:
            dist.all_reduce(logged)
        if self.rank == 0:
            print(f"step {number} loss {logged.item():.7f}", flush=True)


if __name__ == "__main__":
    cli = argparse.ArgumentParser()
    cli.add_argument("--one", action="store_true")
    cli.add_argument("--faulty", action="store_true")
    cli.add_argument("--save", type=Path)
    flags = cli.parse_args()
    if not flags.one:
        dist.init_process_group("gloo")
    trainer = Trainer(Settings(), flags.one, flags.faulty)
    for number in range(1, trainer.s.updates + 1):
        trainer.update(number)
    if flags.save:
        torch.save(trainer.model.state_dict(), flags.save / f"rank{trainer.rank}.pt")
    if not flags.one:
        del trainer.wrapped  # before its process group
        dist.destroy_process_group()
