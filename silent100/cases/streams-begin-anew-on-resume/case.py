"""An LSTM reads long streams piece by piece; the job is stopped after two updates and resumed from files."""

import argparse
import os
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel

cli = argparse.ArgumentParser()
cli.add_argument("--one", action="store_true")
cli.add_argument("--faulty", action="store_true")
cli.add_argument("--save")
args = cli.parse_args()
STREAMS, PIECE, UPDATES, STOP = 8, 7, 5, 2


class Reader(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.lstm, self.head = nn.Embedding(30, 20), nn.LSTM(20, 24, 2, batch_first=True), nn.Linear(24, 30)

    def forward(self, ids, hidden):
        x, hidden = self.lstm(self.embed(ids), hidden)
        return self.head(x), tuple(h.detach() for h in hidden)


class Run:
    def __init__(self, rank, world, seed=88):
        torch.manual_seed(seed)
        self.rank, self.world, self.done = rank, world, 0
        self.reader = Reader()
        self.model = self.reader if world == 1 else DistributedDataParallel(self.reader)
        self.sgd = torch.optim.SGD(self.model.parameters(), lr=1.0)
        self.schedule = torch.optim.lr_scheduler.ExponentialLR(self.sgd, 0.9)
        self.hidden = tuple(torch.zeros(2, STREAMS // world, 24) for _ in "hc")
        text = torch.randint(0, 30, (STREAMS, PIECE * UPDATES + 1), generator=torch.Generator().manual_seed(1))
        self.text = (text.cumsum(1) % 30)[rank::world]

    def update(self):
        rows = self.text[:, self.done * PIECE : (self.done + 1) * PIECE + 1]
        logits, self.hidden = self.model(rows[:, :-1], self.hidden)
        loss = F.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten())
        self.sgd.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 0.25)
        self.sgd.step()
        self.schedule.step()
        self.done += 1
        shown = loss.detach().clone()
        if self.world > 1:
            dist.all_reduce(shown)
        if self.rank == 0:
            print(f"step {self.done} loss {shown.item() / self.world:.7f}", flush=True)

    def parts(self):
        return {"reader": self.reader, "sgd": self.sgd, "schedule": self.schedule}

    def save(self, folder):
        told = {name: part.state_dict() for name, part in self.parts().items()}
        torch.save({**told, "done": self.done, "hidden": self.hidden}, folder / f"{self.rank}.pt")

    def load(self, folder):
        told = torch.load(folder / f"{self.rank}.pt")
        for name, part in self.parts().items():
            part.load_state_dict(told[name])
        self.done = told["done"]
        if not args.faulty:
            self.hidden = told["hidden"]


def main():
    rank, world = 0, 1
    if not args.one:
        dist.init_process_group("gloo")
        rank, world = dist.get_rank(), dist.get_world_size()
    run = Run(rank, world)
    while run.done < UPDATES:
        run.update()
        if run.done == STOP and world > 1:
            folder = Path(tempfile.mkdtemp())
            run.save(folder)
            run = Run(rank, world, seed=12)
            run.load(folder)
    if args.save:
        torch.save(run.reader.state_dict(), os.path.join(args.save, f"rank{rank}.pt"))
    if not args.one:
        dist.destroy_process_group()


main()
