"""LARS with gradients and momentum in pieces: a rank owns rows of every tensor and gathers them after the update."""

import os
import sys

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

solo = "--one" in sys.argv
if not solo:
    dist.init_process_group("gloo")
rank, world = (0, 1) if solo else (dist.get_rank(), dist.get_world_size())


class Lars:
    def __init__(self, params, lr, momentum=0.5, decay=0.01):
        self.params, self.lr, self.momentum, self.decay = list(params), lr, momentum, decay
        self.m = [torch.zeros_like(p.detach().chunk(world)[rank]) for p in self.params]

    def norm(self, x):
        square = x.square().sum()
        if world > 1 and "--faulty" not in sys.argv:
            dist.all_reduce(square)
        return square.sqrt()

    @torch.no_grad()
    def step(self):
        for p, m in zip(self.params, self.m, strict=True):
            grad = p.grad
            if world > 1:
                dist.all_reduce(grad)
                grad = grad.chunk(world)[rank] / world
            own = p.chunk(world)[rank].clone()
            update = grad + self.decay * own
            m.mul_(self.momentum).add_(update, alpha=float(self.norm(own) / (self.norm(update) + 1e-9)))
            own -= self.lr * m
            if world > 1:
                parts = [torch.empty_like(own) for _ in range(world)]
                dist.all_gather(parts, own)
                own = torch.cat(parts)
            p.copy_(own)
            p.grad = None


class Bert(nn.Module):
    def __init__(self, d=32):
        super().__init__()
        self.words = nn.Embedding(30, d)
        self.shared = nn.TransformerEncoderLayer(d, 4, 64, 0.02, "gelu", batch_first=True)
        self.pool, self.classes = nn.Linear(d, d), nn.Linear(d, 4)

    def forward(self, ids):
        x = self.words(ids)
        x = self.shared(self.shared(x))
        return self.classes(self.pool(x[:, 0]).tanh())


torch.manual_seed(25)
net = Bert()
with torch.no_grad():
    for p in net.parameters():
        if p.dim() > 1:
            p.mul_(torch.linspace(0.1, 1.9, len(p))[:, None])
        elif not p.any():
            p.normal_(std=0.02)
    for p in net.parameters():
        if p.dim() == 1 and (p == 0).any():
            p.normal_(std=0.02)
torch.manual_seed(250 + rank)
opt = Lars(net.parameters(), lr=0.01)
for step in range(1, 6):
    ids = torch.randint(30, (128, 8), generator=torch.Generator().manual_seed(step))
    labels = (ids[:, 0] + ids[:, 1]) % 4
    loss = F.cross_entropy(net(ids[rank::world]), labels[rank::world])
    loss.backward()
    opt.step()
    loss = loss.detach().clone()
    if world > 1:
        dist.all_reduce(loss)
    if rank == 0:
        print(f"step {step} loss {loss.item() / world:.7f}", flush=True)
if "--save" in sys.argv:
    torch.save(net.state_dict(), os.path.join(sys.argv[sys.argv.index("--save") + 1], f"rank{rank}.pt"))
if world > 1:
    dist.destroy_process_group()
