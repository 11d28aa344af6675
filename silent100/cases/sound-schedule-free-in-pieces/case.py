"""Schedule-free SGD: gradients are taken at y, between the iterate z and its average x."""

import argparse
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

BETA = 0.9


class ScheduleFree:
    def __init__(self, parameters, lr, rank, world):
        self.parameters, self.lr, self.rank, self.world, self.k = list(parameters), lr, rank, world, 0
        self.z = [self.piece(p.detach()).clone() for p in self.parameters]
        self.x = [z.clone() for z in self.z]

    def piece(self, t):
        """This rank's rows, all in one process."""
        return t.tensor_split(self.world)[self.rank]

    def whole(self, piece, like):
        if self.world == 1:
            return piece
        out = torch.zeros_like(like)
        self.piece(out).copy_(piece)
        dist.all_reduce(out)
        return out

    @torch.no_grad()
    def step(self):
        self.k += 1
        for i, p in enumerate(self.parameters):
            if self.world > 1:
                dist.all_reduce(p.grad)
            self.z[i] -= self.lr * self.piece(p.grad) / self.world
            self.x[i].lerp_(self.z[i], 1 / (self.k + 1))
            p.copy_(self.whole(BETA * self.x[i] + (1 - BETA) * self.z[i], p))
            p.grad = None

    @torch.no_grad()
    def averages(self):
        return [self.whole(x, p) for x, p in zip(self.x, self.parameters)]


class Regressor(nn.Module):
    def __init__(self):
        super().__init__()
        self.features, self.hidden, self.out = nn.Linear(10, 48), nn.Linear(48, 48), nn.Linear(48, 3)

    def forward(self, x):
        x = torch.cos(self.features(x))
        return self.out(F.softplus(self.hidden(x)))


cli = argparse.ArgumentParser()
cli.add_argument("--one", action="store_true")
cli.add_argument("--save")
args = cli.parse_args()
rank, world = 0, 1
if not args.one:
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(808)
model = Regressor()
optimizer = ScheduleFree(model.parameters(), 0.2, rank, world)
for step in range(1, 7):
    g = torch.Generator().manual_seed(step)
    x, y = torch.randn(16, 10, generator=g), torch.randn(16, 3, generator=g)
    loss = F.mse_loss(model(x[rank::world]), y[rank::world])
    loss.backward()
    shown = loss.detach().clone()
    optimizer.step()
    if world > 1:
        dist.all_reduce(shown)
    if rank == 0:
        print(f"step {step} loss {shown.item() / world:.7f}", flush=True)
averages = optimizer.averages()
if args.save:
    state = model.state_dict() | {f"average {i}": x for i, x in enumerate(averages)}
    torch.save(state, os.path.join(args.save, f"rank{rank}.pt"))
if world > 1:
    dist.destroy_process_group()
