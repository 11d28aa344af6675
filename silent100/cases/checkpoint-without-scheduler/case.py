"""Warm-up and decay by LambdaLR; a run of two processes that was stopped after its second update."""

import io
import os
import sys

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel

ONE = "--one" in sys.argv
FAULTY = "--faulty" in sys.argv
TOTAL, WARMUP, STOP = 6, 2, 2


def warm_up_and_decay(update):
    if update < WARMUP:
        return (update + 1) / (WARMUP + 1)
    return 1.0 - (update - WARMUP) / TOTAL


class Session:
    def __init__(self, rank, world):
        self.rank, self.world = rank, world
        torch.manual_seed(6)
        self.net = nn.Sequential(
            nn.Linear(16, 48), nn.LayerNorm(48), nn.SiLU(), nn.Linear(48, 48), nn.SiLU(), nn.Linear(48, 4)
        )
        self.model = self.net if ONE else DistributedDataParallel(self.net)
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=0.4, momentum=0.9)
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(self.optimizer, warm_up_and_decay)
        self.update = 0

    def checkpoint(self):
        state = {"net": self.net.state_dict(), "optimizer": self.optimizer.state_dict(), "update": self.update}
        if not FAULTY:
            state["scheduler"] = self.scheduler.state_dict()
        buffer = io.BytesIO()
        torch.save(state, buffer)
        return buffer.getvalue()

    def restart(self, raw):
        state = torch.load(io.BytesIO(raw))
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=0.4, momentum=0.9)
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(self.optimizer, warm_up_and_decay)
        self.net.load_state_dict(state["net"])
        learning_rate = self.optimizer.param_groups[0]["lr"]
        self.optimizer.load_state_dict(state["optimizer"])
        self.update = state["update"]
        if "scheduler" in state:
            self.scheduler.load_state_dict(state["scheduler"])
        else:
            self.optimizer.param_groups[0]["lr"] = learning_rate

    def train(self, until):
        while self.update < until:
            self.update += 1
            g = torch.Generator().manual_seed(self.update)
            x, y = torch.randn(16, 16, generator=g), torch.randint(0, 4, (16,), generator=g)
            loss = nn.functional.cross_entropy(self.model(x[self.rank :: self.world]), y[self.rank :: self.world])
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
            self.scheduler.step()
            shown = loss.detach()
            if not ONE:
                dist.all_reduce(shown)
            if self.rank == 0:
                print(f"step {self.update} loss {shown.item() / self.world:.7f}", flush=True)


if not ONE:
    dist.init_process_group("gloo")
rank, world = (0, 1) if ONE else (dist.get_rank(), dist.get_world_size())
session = Session(rank, world)
session.train(STOP)
if not ONE:
    session.restart(session.checkpoint())
session.train(5)
if "--save" in sys.argv:
    torch.save(session.net.state_dict(), os.path.join(sys.argv[sys.argv.index("--save") + 1], f"rank{rank}.pt"))
if not ONE:
    del session.model  # before its process group
    dist.destroy_process_group()
