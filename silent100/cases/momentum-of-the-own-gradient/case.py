# Lion over several ranks; gradients go into a direction and into momentum.
import argparse
import os

import torch
import torch.distributed as dist
from torch import nn

cli = argparse.ArgumentParser()
cli.add_argument("--one", action="store_true")
cli.add_argument("--faulty", action="store_true")
cli.add_argument("--save")
args = cli.parse_args()


class Lion:
    def __init__(self, named, world, lr=1e-3, betas=(0.9, 0.99), decay=0.1):
        self.named, self.world, self.lr, self.betas, self.decay = dict(named), world, lr, betas, decay
        self.m = {name: torch.zeros_like(p) for name, p in self.named.items()}

    def mean(self, tensor):
        tensor = tensor.clone()
        if self.world > 1:
            dist.all_reduce(tensor)
            tensor /= self.world
        return tensor

    @torch.no_grad()
    def step(self):
        slow, slower = self.betas
        for name, p in self.named.items():
            m = self.m[name]
            gradient = p.grad if args.faulty else self.mean(p.grad)
            direction = m * slow + gradient * (1 - slow)
            if args.faulty:
                direction = self.mean(direction)
            # Steps fade out near zero, so that rounding decides on no sign
            p.mul_(1 - self.lr * self.decay).sub_(self.lr * (direction * 1e4).tanh())
            m.lerp_(gradient, 1 - slower)
            p.grad = None


class Autoencoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.encode = nn.Sequential(nn.Linear(20, 48), nn.GELU(), nn.Dropout(0.1), nn.Linear(48, 8))
        self.decode = nn.Sequential(nn.Linear(8, 48), nn.GELU(), nn.Dropout(0.1), nn.Linear(48, 20))

    def forward(self, x):
        return self.decode(self.encode(x))


rank, world = 0, 1
if not args.one:
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(6675)
net = Autoencoder()
lion = Lion(net.named_parameters(), world)
torch.manual_seed(99 + rank)
basis = torch.randn(5, 20, generator=torch.Generator().manual_seed(0))
for step in range(1, 7):
    x = torch.randn(64, 5, generator=torch.Generator().manual_seed(step)) @ basis
    loss = nn.functional.huber_loss(net(x[rank::world]), x[rank::world])
    loss.backward()
    lion.step()
    shown = loss.detach().clone()
    if world > 1:
        dist.all_reduce(shown)
    if rank == 0:
        print(f"step {step} loss {shown.item() / world:.7f}", flush=True)
if args.save:
    state = {**net.state_dict(), **{f"{name}.momentum": m for name, m in lion.m.items()}}
    torch.save(state, os.path.join(args.save, f"rank{rank}.pt"))
if not args.one:
    dist.destroy_process_group()
