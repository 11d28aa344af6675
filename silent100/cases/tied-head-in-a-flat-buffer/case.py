import argparse
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F


class Block(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.norm = nn.RMSNorm(d)
        self.gate, self.value, self.out = nn.Linear(d, d), nn.Linear(d, d), nn.Linear(d, d)

    def forward(self, x):
        h = self.norm(x)
        w = torch.sigmoid(self.gate(h))
        return x + self.out((w * self.value(h)).cumsum(1) / w.cumsum(1))


class LM(nn.Module):
    def __init__(self, vocab=42, d=32):
        super().__init__()
        self.embed = nn.Embedding(vocab, d)
        self.blocks = nn.ModuleList([Block(d), Block(d)])
        self.norm = nn.RMSNorm(d)
        self.head = nn.Linear(d, vocab)
        nn.init.normal_(self.embed.weight, std=0.3)
        self.head.weight = self.embed.weight

    def forward(self, ids):
        x = self.embed(ids)
        for b in self.blocks:
            x = b(x)
        return self.head(self.norm(x))


class FlatEngine:
    """All parameters become views of one flat buffer; each rank keeps Adam moments for its part only."""

    def __init__(self, model, rank, world, dedup=True, lr=2e-3):
        self.rank, self.world, self.lr, self.t = rank, world, lr, 0
        slots, seen = [], {}
        for mod in model.modules():
            for name, p in mod._parameters.items():
                if p is None:
                    continue
                if dedup and p in seen:
                    slots[seen[p]][1].append((mod, name))
                    continue
                seen[p] = len(slots)
                slots.append((p.detach(), [(mod, name)]))
        n = sum(p.numel() for p, _ in slots)
        self.chunk = -(-n // world)
        self.flat = torch.zeros(self.chunk * world)
        self.grad = torch.zeros_like(self.flat)
        off = 0
        for p, users in slots:
            view = self.flat[off : off + p.numel()].view_as(p)
            view.copy_(p)
            new = nn.Parameter(view)
            new.grad = self.grad[off : off + p.numel()].view_as(p)
            for mod, name in users:
                mod._parameters[name] = new
            off += p.numel()
        self.m, self.v = torch.zeros(self.chunk), torch.zeros(self.chunk)

    @torch.no_grad()
    def step(self):
        self.t += 1
        if self.world > 1:
            dist.all_reduce(self.grad)
        mine = slice(self.rank * self.chunk, (self.rank + 1) * self.chunk)
        g = self.grad[mine]
        self.m.lerp_(g, 0.1)
        self.v.lerp_(g * g, 0.01)
        part = self.flat[mine] - self.lr * (self.m / (1 - 0.9**self.t)) / ((self.v / (1 - 0.99**self.t)).sqrt() + 1e-4)
        parts = [part]
        if self.world > 1:
            parts = [torch.empty_like(part) for _ in range(self.world)]
            dist.all_gather(parts, part)
        self.flat.copy_(torch.cat(parts))
        self.grad.zero_()


ap = argparse.ArgumentParser()
ap.add_argument("--one", action="store_true")
ap.add_argument("--faulty", action="store_true")
ap.add_argument("--save")
args = ap.parse_args()
rank, world = 0, 1
if not args.one:
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(16)
model = LM()
engine = FlatEngine(model, rank, world, dedup=not args.faulty)
for step in range(1, 5):
    ids = torch.randint(42, (8, 9), generator=torch.Generator().manual_seed(step)).chunk(world)[rank]
    loss = F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten()) / world
    loss.backward()
    loss = loss.detach()
    if world > 1:
        dist.all_reduce(loss)
    engine.step()
    if rank == 0:
        print(f"step {step} loss {loss.item():.7f}", flush=True)
if args.save:
    torch.save(
        {n: p.detach().clone() for n, p in model.state_dict().items()}, os.path.join(args.save, f"rank{rank}.pt")
    )
if world > 1:
    dist.destroy_process_group()
