"""All parameters lie in one flat vector, cut in two; layers have rates of their own, and only matrices decay."""

import argparse
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

cli = argparse.ArgumentParser()
cli.add_argument("--one", action="store_true")
cli.add_argument("--faulty", action="store_true")
cli.add_argument("--save")
args = cli.parse_args()
rank, world = 0, 1
if not args.one:
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()


def flat(tensors):
    vector = torch.cat([t.flatten() for t in tensors])
    return F.pad(vector, (0, -len(vector) % world))


class FlatAdamW:
    def __init__(self, groups, betas=(0.9, 0.95)):
        self.parameters = [p for group in groups for p in group["params"]]
        rates = flat([torch.full_like(p, group["lr"]) for group in groups for p in group["params"]])
        decays = flat([torch.full_like(p, group["decay"]) for group in groups for p in group["params"]])
        part = len(rates) // world
        self.mine = slice(rank * part, (rank + 1) * part)
        known = slice(part) if args.faulty else self.mine
        self.rates, self.decays = rates[known], decays[known]
        self.m, self.v = torch.zeros(part), torch.zeros(part)
        self.betas, self.t = betas, 0

    @torch.no_grad()
    def step(self):
        self.t += 1
        g, w = flat([p.grad for p in self.parameters]), flat(self.parameters)
        if world > 1:
            dist.all_reduce(g)
        g, own = g[self.mine] / world, w[self.mine]
        b1, b2 = self.betas
        self.m.lerp_(g, 1 - b1)
        self.v.lerp_(g * g, 1 - b2)
        step = (self.m / (1 - b1**self.t)) / ((self.v / (1 - b2**self.t)).sqrt() + 1e-4)
        own = own - self.rates * (step + self.decays * own)
        parts = [own]
        if world > 1:
            parts = [torch.empty_like(own) for _ in range(world)]
            dist.all_gather(parts, own.contiguous())
        w, at = torch.cat(parts), 0
        for p in self.parameters:
            p.copy_(w[at : at + p.numel()].view_as(p))
            at += p.numel()
            p.grad = None


class Mixer(nn.Module):
    def __init__(self, d=16, n=6):
        super().__init__()
        self.inp = nn.Linear(8, d)
        self.mix, self.norm = (
            nn.ModuleList(nn.Linear(n, n) for _ in range(3)),
            nn.ModuleList(nn.LayerNorm(d) for _ in range(3)),
        )
        self.ffn = nn.ModuleList(nn.Linear(d, d) for _ in range(3))
        self.head = nn.Linear(d, 5)

    def forward(self, x):
        x = self.inp(x)
        for mix, norm, ffn in zip(self.mix, self.norm, self.ffn):
            x = x + mix(norm(x).transpose(1, 2)).transpose(1, 2)
            x = x + F.gelu(ffn(x))
        return self.head(x.mean(1))


torch.manual_seed(95)
net = Mixer()
groups = []
for name, p in net.named_parameters():
    depth = 0 if name.startswith("inp") else 4 if name.startswith("head") else 1 + int(name.split(".")[1])
    groups.append({"params": [p], "lr": 4e-3 * 0.7 ** (4 - depth), "decay": 0.1 if p.dim() > 1 else 0.0})
optimizer = FlatAdamW(groups)
for step in range(1, 5):
    g = torch.Generator().manual_seed(step)
    x, y = torch.randn(16, 6, 8, generator=g), torch.randint(0, 5, (16,), generator=g)
    loss = F.cross_entropy(net(x[rank::world]), y[rank::world])
    loss.backward()
    optimizer.step()
    shown = loss.detach().clone()
    if world > 1:
        dist.all_reduce(shown)
    if rank == 0:
        print(f"step {step} loss {shown.item() / world:.7f}", flush=True)
if args.save:
    torch.save(net.state_dict(), os.path.join(args.save, f"rank{rank}.pt"))
if not args.one:
    dist.destroy_process_group()
