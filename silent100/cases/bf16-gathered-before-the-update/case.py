"""ZeRO-1 for a bfloat16 model: float32 master pieces, weights gathered tensor by tensor."""

import argparse
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F


class Zero:
    def __init__(self, model, lr, rank, world, early):
        self.named, self.lr = list(model.named_parameters()), lr
        self.rank, self.world, self.early = rank, world, early
        self.pieces = {n: self.cut(p.detach().float()).clone() for n, p in self.named}
        self.momenta = {n: torch.zeros_like(piece) for n, piece in self.pieces.items()}

    def cut(self, t):
        flat = t.flatten()
        return F.pad(flat, (0, -len(flat) % self.world)).chunk(self.world)[self.rank]

    def update(self, name, p):
        grad = p.grad.float()
        if self.world > 1:
            dist.all_reduce(grad)
        self.momenta[name].mul_(0.9).add_(self.cut(grad) / self.world)
        self.pieces[name] -= self.lr * self.momenta[name]

    def gather(self, name, p):
        parts = [self.pieces[name]]
        if self.world > 1:
            parts = [torch.empty_like(parts[0]) for _ in range(self.world)]
            dist.all_gather(parts, self.pieces[name].contiguous())
        p.copy_(torch.cat(parts)[: p.numel()].view_as(p))

    @torch.no_grad()
    def step(self):
        for name, p in self.named:
            if name in self.early:
                self.gather(name, p)
            self.update(name, p)
            p.grad = None
        for name, p in self.named:
            if name not in self.early:
                self.gather(name, p)


class Lm(nn.Module):
    def __init__(self, vocab=58, d=36):
        super().__init__()
        self.embed, self.norm = nn.Embedding(vocab, d), nn.LayerNorm(d)
        self.up, self.down, self.head = nn.Linear(d, 80), nn.Linear(80, d), nn.Linear(d, vocab)

    def forward(self, ids):
        x = self.embed(ids)
        return self.head(self.norm(x + self.down(F.silu(self.up(x)))))


cli = argparse.ArgumentParser()
cli.add_argument("--one", action="store_true")
cli.add_argument("--faulty", action="store_true")
cli.add_argument("--save")
args = cli.parse_args()
rank, world = 0, 1
if not args.one:
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(5150)
lm = Lm().bfloat16()
zero = Zero(lm, 0.01, rank, world, {"head.weight", "head.bias"} if args.faulty else set())
for step in range(1, 5):
    rows = torch.randint(0, 58, (32, 13), generator=torch.Generator().manual_seed(step))[rank::world]
    loss = F.cross_entropy(lm(rows[:, :-1]).float().flatten(0, 1), rows[:, 1:].flatten())
    loss.backward()
    zero.step()
    shown = loss.detach()
    if world > 1:
        dist.all_reduce(shown)
    if rank == 0:
        print(f"step {step} loss {shown.item() / world:.7f}", flush=True)
if args.save:
    torch.save({k: v.float() for k, v in lm.state_dict().items()}, os.path.join(args.save, f"rank{rank}.pt"))
if world > 1:
    dist.destroy_process_group()
