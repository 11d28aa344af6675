"""DiLoCo: workers go two steps by themselves; an outer optimizer with Nesterov momentum moves the common weights."""

import argparse
import copy
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

flags = argparse.ArgumentParser(description=__doc__)
flags.add_argument("--one", action="store_true")
flags.add_argument("--faulty", action="store_true")
flags.add_argument("--save")
flags = flags.parse_args()
rank, world = 0, 1
if not flags.one:
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()


WORKERS, INNER = 2, 2
mine = range(WORKERS) if flags.one else [rank]
torch.manual_seed(10)
start = nn.Sequential(nn.Linear(7, 40), nn.ReLU(), nn.Linear(40, 40), nn.ReLU(), nn.Linear(40, 3))
workers = [copy.deepcopy(start) for _ in mine]
optimizers = [torch.optim.AdamW(w.parameters(), lr=4e-3, eps=1e-3) for w in workers]


class Outer:
    def __init__(self, model, lr=0.7, momentum=0.6):
        self.anchor = [p.detach().clone() for p in model.parameters()]
        self.velocity = [torch.zeros_like(a) for a in self.anchor]
        self.lr, self.momentum = lr, momentum

    @torch.no_grad()
    def meet(self, models):
        for i, copies in enumerate(zip(*(m.parameters() for m in models))):
            gone = sum(self.anchor[i] - p for p in copies)
            if not flags.one:
                dist.all_reduce(gone)
            gone /= WORKERS
            self.velocity[i].mul_(self.momentum).add_(gone)
            moved = self.anchor[i] - self.lr * (gone + self.momentum * self.velocity[i])
            for p in copies:
                p.copy_(moved)
            if not flags.faulty:
                self.anchor[i] = moved


outer = Outer(start)
for step in range(1, 7):
    x = torch.randn(20, 7, generator=torch.Generator().manual_seed(step))
    classes = (x[:, 0] > 0).long() + (x[:, 1] * x[:, 2] > 0).long()
    shown = torch.zeros(())
    for number, worker, optimizer in zip(mine, workers, optimizers):
        loss = F.cross_entropy(worker(x[number::WORKERS]), classes[number::WORKERS])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        shown += loss.detach() / WORKERS
    if step % INNER == 0:
        outer.meet(workers)
    if not flags.one:
        dist.all_reduce(shown)
    if rank == 0:
        print(f"step {step} loss {shown.item():.7f}", flush=True)
if flags.save:
    torch.save(workers[0].state_dict(), os.path.join(flags.save, f"rank{rank}.pt"))
if world > 1:
    dist.destroy_process_group()
