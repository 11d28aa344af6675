"""Many microbatches per update, gradients added up in buffers of the trainer's own."""

import os
import sys

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

ALONE = "--one" in sys.argv
KIND = torch.bfloat16 if "--faulty" in sys.argv else torch.float32
if not ALONE:
    dist.init_process_group("gloo")


class Highway(nn.Module):
    def __init__(self, n):
        super().__init__()
        self.carry, self.change = nn.Linear(n, n), nn.Linear(n, n)

    def forward(self, x):
        t = torch.sigmoid(self.carry(x) - 1)
        return t * torch.relu(self.change(x)) + (1 - t) * x


class Trainer:
    def __init__(self, model, micro=16):
        self.rank, self.world = (0, 1) if ALONE else (dist.get_rank(), dist.get_world_size())
        self.model, self.micro = model, micro
        self.params = list(model.parameters())
        self.buffers = [torch.zeros(p.shape, dtype=KIND) for p in self.params]
        self.optimizer = torch.optim.AdamW(self.params, lr=1e-3, weight_decay=0.05)

    def add(self):
        for p, b in zip(self.params, self.buffers, strict=True):
            b += p.grad.to(b.dtype)
            p.grad = None

    def update(self):
        for p, b in zip(self.params, self.buffers, strict=True):
            p.grad = b.float().clone()
            if self.world > 1:
                dist.all_reduce(p.grad)
            b.zero_()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def step(self, x, y):
        total = torch.zeros(())
        for i in range(self.rank, self.micro, self.world):
            loss = F.huber_loss(self.model(x[i]), y[i]) / self.micro
            loss.backward()
            total += loss.detach()
            self.add()
        self.update()
        if self.world > 1:
            dist.all_reduce(total)
        return total.item()


torch.manual_seed(47)
trainer = Trainer(nn.Sequential(nn.Linear(9, 24), Highway(24), Highway(24), nn.Linear(24, 3)))
for step in range(1, 6):
    g = torch.Generator().manual_seed(step)
    x = torch.randn(16, 4, 9, generator=g)
    loss = trainer.step(x, x.unfold(-1, 3, 3).prod(-1))
    if trainer.rank == 0:
        print(f"step {step} loss {loss:.7f}", flush=True)
if "--save" in sys.argv:
    torch.save(
        trainer.model.state_dict(), os.path.join(sys.argv[sys.argv.index("--save") + 1], f"rank{trainer.rank}.pt")
    )
if not ALONE:
    dist.destroy_process_group()
