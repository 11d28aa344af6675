"""An energy-based model with persistent chains (Langevin negatives); it stops after three steps and goes on."""

import io
import os
import sys

import torch
import torch.distributed as dist
from torch import nn

ONE, FAULTY = "--one" in sys.argv, "--faulty" in sys.argv
CHAINS, WIDTH = 12, 6


class Trainer:
    def __init__(self, rank, world):
        self.rank, self.world = rank, world
        torch.manual_seed(18)
        self.energy = nn.Sequential(nn.Linear(WIDTH, 24), nn.SiLU(), nn.Linear(24, 24), nn.SiLU(), nn.Linear(24, 1))
        self.optimizer = torch.optim.SGD(self.energy.parameters(), lr=0.05, momentum=0.5)
        self.chains = (torch.randn(CHAINS, WIDTH) * 2)[rank::world].clone()

    def walk(self, step):
        noise = torch.randn(CHAINS, WIDTH, generator=torch.Generator().manual_seed(50 + step))[self.rank :: self.world]
        for _ in range(3):
            x = self.chains.requires_grad_()
            (slope,) = torch.autograd.grad(self.energy(x).sum(), x)
            self.chains = (x - 0.1 * slope + 0.05 * noise).detach()

    def update(self, step):
        self.walk(step)
        data = torch.randn(CHAINS, WIDTH, generator=torch.Generator().manual_seed(step)).tanh()[self.rank :: self.world]
        high, low = self.energy(self.chains), self.energy(data)
        loss = (low.sum() - high.sum() + 0.05 * (low.square().sum() + high.square().sum())) / CHAINS
        self.optimizer.zero_grad()
        loss.backward()
        loss = loss.detach()
        if self.world > 1:
            for p in self.energy.parameters():
                dist.all_reduce(p.grad)
            dist.all_reduce(loss)
        self.optimizer.step()
        if self.rank == 0:
            print(f"step {step} loss {1 + loss.item():.7f}", flush=True)

    def checkpoint(self):
        """Every rank calls this; what is returned is what rank 0 would write to disk."""
        chains = [self.chains]
        if self.world > 1 and not FAULTY:
            chains = [torch.empty_like(self.chains) for _ in range(self.world)]
            dist.all_gather(chains, self.chains)
        box = [{"model": self.energy.state_dict(), "optimizer": self.optimizer.state_dict(), "chains": chains}]
        if self.world > 1:
            dist.broadcast_object_list(box, 0)
        file = io.BytesIO()
        torch.save(box[0], file)
        return file

    def restore(self, file):
        file.seek(0)
        read = torch.load(file)
        self.energy.load_state_dict(read["model"])
        self.optimizer.load_state_dict(read["optimizer"])
        self.chains = read["chains"][self.rank % len(read["chains"])].clone()


if not ONE:
    dist.init_process_group("gloo")
place = (0, 1) if ONE else (dist.get_rank(), dist.get_world_size())
trainer = Trainer(*place)
for step in (1, 2, 3):
    trainer.update(step)
file = trainer.checkpoint()
trainer = Trainer(*place)
trainer.restore(file)
for step in (4, 5, 6):
    trainer.update(step)
if "--save" in sys.argv:
    folder = sys.argv[sys.argv.index("--save") + 1]
    torch.save(trainer.energy.state_dict(), os.path.join(folder, f"rank{place[0]}.pt"))
if not ONE:
    dist.destroy_process_group()
