"""Contrast against a queue of keys of former batches.

The job is stopped after its third step and goes on from a file.
"""

import copy
import io
import os
import sys

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

ONE, FAULTY = "--one" in sys.argv, "--faulty" in sys.argv
if not ONE:
    dist.init_process_group("gloo")
rank, world = (0, 1) if ONE else (dist.get_rank(), dist.get_world_size())


SIZE, ROWS, HEAT = 48, 8, 0.3


class Trainer:
    def __init__(self):
        torch.manual_seed(29)
        self.query = nn.Sequential(nn.Linear(12, 32), nn.ReLU(), nn.Linear(32, 8))
        self.key = copy.deepcopy(self.query).requires_grad_(False)
        self.optimizer = torch.optim.SGD(self.query.parameters(), lr=0.1, momentum=0.9)
        self.queue = F.normalize(torch.randn(SIZE, 8), dim=1)

    def saved(self):
        state = {name: getattr(self, name).state_dict() for name in ("query", "key", "optimizer")}
        return state if FAULTY else state | {"queue": self.queue}

    def restore(self, state):
        for name in ("query", "key", "optimizer"):
            getattr(self, name).load_state_dict(state[name])
        self.queue = state.get("queue", self.queue)

    def step(self, a, b):
        with torch.no_grad():
            for k, q in zip(self.key.parameters(), self.query.parameters()):
                k.lerp_(q, 0.1)
            keys = F.normalize(self.key(b), dim=1)
        q = F.normalize(self.query(a), dim=1)
        logits = torch.cat([(q * keys).sum(1, keepdim=True), q @ self.queue.T], 1) / HEAT
        loss = F.cross_entropy(logits, torch.zeros(len(q), dtype=torch.long)) / world
        self.optimizer.zero_grad()
        loss.backward()
        shown = loss.detach()
        if world > 1:
            parts = [torch.empty_like(keys) for _ in range(world)]
            dist.all_gather(parts, keys)
            keys = torch.cat(parts)
            for p in self.query.parameters():
                dist.all_reduce(p.grad)
            dist.all_reduce(shown)
        self.optimizer.step()
        self.queue = torch.cat([keys, self.queue])[:SIZE]
        return shown.item()


trainer = Trainer()
for step in range(1, 7):
    g = torch.Generator().manual_seed(step)
    x = torch.randn(ROWS, 12, generator=g)
    views = x + 0.2 * torch.randn(2, ROWS, 12, generator=g)
    loss = trainer.step(*(v.chunk(world)[rank] for v in views))
    if rank == 0:
        print(f"step {step} loss {loss:.7f}", flush=True)
    if step == 3:
        file = io.BytesIO()
        torch.save(trainer.saved(), file)
        file.seek(0)
        trainer = Trainer()
        trainer.restore(torch.load(file))
if "--save" in sys.argv:
    torch.save(trainer.query.state_dict(), os.path.join(sys.argv[sys.argv.index("--save") + 1], f"rank{rank}.pt"))
if world > 1:
    dist.destroy_process_group()
