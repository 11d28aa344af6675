"""Gradient accumulation in a job that is stopped between two microbatches and goes on in new objects."""

import os
import sys
import tempfile

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

ONE, FAULTY = "--one" in sys.argv, "--faulty" in sys.argv
ACCUMULATE, STOP = 4, 10
rank, world = 0, 1
if not ONE:
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()


class Conv(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Conv1d(4, 16, 3, padding=1), nn.Conv1d(16, 16, 5, padding=2)
        self.norm, self.head = nn.GroupNorm(4, 16), nn.Linear(16, 5)

    def forward(self, x):
        x = F.gelu(self.a(x))
        x = x + F.gelu(self.b(self.norm(x)))
        return self.head(x.amax(-1))


class Job:
    def __init__(self, seed):
        torch.manual_seed(seed)
        self.net = Conv()
        self.optimizer = torch.optim.AdamW(self.net.parameters(), lr=3e-3, eps=1e-4)
        self.micro, self.total = 0, torch.zeros(())

    def save(self, file):
        told = {"net": self.net.state_dict(), "optimizer": self.optimizer.state_dict()}
        told |= {"micro": self.micro, "total": self.total}
        if not FAULTY:
            told["gradients"] = [p.grad for p in self.net.parameters()]
        torch.save(told, file)

    def load(self, file):
        told = torch.load(file)
        self.net.load_state_dict(told["net"])
        self.optimizer.load_state_dict(told["optimizer"])
        self.micro, self.total = told["micro"], told["total"]
        for p, g in zip(self.net.parameters(), told.get("gradients", [])):
            p.grad = g

    def microbatch(self):
        g = torch.Generator().manual_seed(self.micro)
        x, y = torch.randn(8, 4, 12, generator=g), torch.randint(0, 5, (8,), generator=g)
        x[:, 0] += y[:, None] - 2
        loss = F.cross_entropy(self.net(x[rank::world]), y[rank::world]) / ACCUMULATE
        loss.backward()
        self.total += loss.detach()
        self.micro += 1

    def update(self):
        if world > 1:
            for p in self.net.parameters():
                dist.all_reduce(p.grad)
                p.grad /= world
            dist.all_reduce(self.total)
        nn.utils.clip_grad_norm_(self.net.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        if rank == 0:
            print(f"step {self.micro // ACCUMULATE} loss {self.total.item() / world:.7f}", flush=True)
        self.total = torch.zeros(())


job = Job(4)
stopped = False
while job.micro < 4 * ACCUMULATE:
    if job.micro == STOP and not ONE and not stopped:
        stopped = True
        # Each rank writes a file of its own
        file = os.path.join(tempfile.mkdtemp(), f"part{rank}.pt")
        job.save(file)
        job = Job(99 + rank)
        job.load(file)
    job.microbatch()
    if job.micro % ACCUMULATE == 0:
        job.update()
if "--save" in sys.argv:
    torch.save(job.net.state_dict(), os.path.join(sys.argv[sys.argv.index("--save") + 1], f"rank{rank}.pt"))
if not ONE:
    dist.destroy_process_group()
