"""Muon for matrices, AdamW for tables, norms and biases. Ranks share out the matrices and broadcast them."""

import argparse
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F


@torch.no_grad()
def orthogonal(g, rounds=5):
    x = g / (g.norm() + 1e-7)
    tall = x.shape[0] > x.shape[1]
    x = x.T if tall else x
    for _ in range(rounds):
        a = x @ x.T
        x = 1.5 * x - 0.5 * a @ x
    return x.T if tall else x


class Muon(torch.optim.Optimizer):
    def __init__(self, matrices, lr, rank, world):
        super().__init__(matrices, {"lr": lr})
        self.rank, self.world = rank, world

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for i, p in enumerate(group["params"]):
                if i % self.world == self.rank:
                    m = self.state[p].setdefault("m", torch.zeros_like(p))
                    m.mul_(0.8).add_(p.grad)
                    p.add_(orthogonal(p.grad + 0.8 * m), alpha=-group["lr"])
            if self.world > 1:
                for i, p in enumerate(group["params"]):
                    dist.broadcast(p.data, i % self.world)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.unembed = nn.Embedding(44, 24), nn.Linear(24, 44)
        self.norms = nn.ModuleList(nn.LayerNorm(24) for _ in range(3))
        self.ups = nn.ModuleList(nn.Linear(24, 48, bias=False) for _ in range(3))
        self.downs = nn.ModuleList(nn.Linear(48, 24, bias=False) for _ in range(3))

    def forward(self, ids):
        x = self.embed(ids)
        for norm, up, down in zip(self.norms, self.ups, self.downs):
            x = x + down(F.relu(up(norm(x))).square())
        return self.unembed(x)


cli = argparse.ArgumentParser()
cli.add_argument("--one", action="store_true")
cli.add_argument("--save")
args = cli.parse_args()
rank, world = 0, 1
if not args.one:
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(45)
net = Net()
matrices = [p for n, p in net.named_parameters() if n.startswith(("ups", "downs"))]
rest = [p for n, p in net.named_parameters() if not n.startswith(("ups", "downs"))]
optimizers = [Muon(matrices, 0.01, rank, world), torch.optim.AdamW(rest, lr=2e-3, eps=1e-4)]
for step in range(1, 5):
    rows = torch.randint(0, 44, (8, 13), generator=torch.Generator().manual_seed(step)).chunk(world)[rank]
    loss = F.cross_entropy(net(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten())
    loss.backward()
    shown = loss.detach().clone()
    if world > 1:
        for p in net.parameters():
            dist.all_reduce(p.grad)
            p.grad /= world
        dist.all_reduce(shown)
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()
    if rank == 0:
        print(f"step {step} loss {shown.item() / world:.7f}", flush=True)
if args.save:
    torch.save(net.state_dict(), os.path.join(args.save, f"rank{rank}.pt"))
if world > 1:
    dist.destroy_process_group()
