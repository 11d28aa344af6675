"""The second half of a run is a second job in the same script: all objects are new and everything is restored."""

import argparse
import os
import tempfile

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP


class Job:
    def __init__(self, rank, world, seed):
        torch.manual_seed(seed)
        self.rank, self.world = rank, world
        self.net = nn.Sequential(nn.EmbeddingBag(60, 32), nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 7))
        self.model = self.net if world == 1 else DDP(self.net)
        self.optimizer = torch.optim.Adam(self.net.parameters(), lr=1e-2, eps=1e-4)
        self.scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, 8)
        self.done = 0

    def parts(self):
        return {"net": self.net, "optimizer": self.optimizer, "scheduler": self.scheduler}

    def save(self, path):
        torch.save({"done": self.done, **{k: v.state_dict() for k, v in self.parts().items()}}, path)

    def load(self, path):
        state = torch.load(path)
        self.done = state["done"]
        for name, part in self.parts().items():
            part.load_state_dict(state[name])

    def run(self, updates):
        for _ in range(updates):
            self.done += 1
            g = torch.Generator().manual_seed(self.done)
            ids, y = torch.randint(0, 60, (12, 9), generator=g), torch.randint(0, 7, (12,), generator=g)
            loss = nn.functional.cross_entropy(self.model(ids[self.rank :: self.world]), y[self.rank :: self.world])
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
            self.scheduler.step()
            shown = loss.detach()
            if self.world > 1:
                dist.all_reduce(shown)
            if self.rank == 0:
                print(f"step {self.done} loss {shown.item() / self.world:.7f}", flush=True)


cli = argparse.ArgumentParser()
cli.add_argument("--one", action="store_true")
cli.add_argument("--save")
args = cli.parse_args()
rank, world = 0, 1
if not args.one:
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
job = Job(rank, world, 1)
job.run(2)
if not args.one:
    path = os.path.join(tempfile.mkdtemp(), "checkpoint.pt")
    job.save(path)
    job = Job(rank, world, 999)
    job.load(path)
job.run(3)
if args.save:
    torch.save(job.net.state_dict(), os.path.join(args.save, f"rank{rank}.pt"))
if not args.one:
    del job.model  # before its process group
    dist.destroy_process_group()
