# A denoiser with a moving average that is kept in a list of tensors; its half-life is counted in images.
import argparse
import copy
import os

import torch
import torch.distributed as dist
from torch import nn

cli = argparse.ArgumentParser()
cli.add_argument("--one", action="store_true")
cli.add_argument("--faulty", action="store_true")
cli.add_argument("--save")
args = cli.parse_args()
HALF_LIFE = 60.0


class Denoiser(nn.Module):
    def __init__(self, channels=12):
        super().__init__()
        self.first = nn.Conv2d(3, channels, 3, padding=1)
        self.noise = nn.Sequential(nn.Linear(1, channels), nn.SiLU(), nn.Linear(channels, channels))
        self.norm = nn.GroupNorm(3, channels)
        self.middle = nn.Conv2d(channels, channels, 3, padding=1)
        self.last = nn.Conv2d(channels, 3, 3, padding=1)

    def forward(self, x, sigma):
        scale = 1 / (1 + sigma**2).sqrt()
        h = self.first(x * scale) + self.noise(sigma.flatten(1).log() / 4)[:, :, None, None]
        h = h + torch.nn.functional.silu(self.middle(self.norm(h)))
        return x * scale**2 + self.last(h) * sigma * scale


class Trainer:
    def __init__(self, rank, world):
        self.rank, self.world = rank, world
        torch.manual_seed(64)
        self.net = Denoiser()
        self.average = [p.detach().clone() for p in self.net.parameters()]
        self.optimizer = torch.optim.AdamW(self.net.parameters(), lr=2e-3, eps=1e-4)

    def loss(self, images, sigma, noise):
        weight = (sigma**2 + 1) / sigma**2
        return (weight * (self.net(images + sigma * noise, sigma) - images).square()).mean()

    @torch.no_grad()
    def follow(self, batch):
        beta = 0.5 ** (batch / HALF_LIFE)
        for mine, p in zip(self.average, self.net.parameters()):
            mine.copy_(p.lerp(mine, beta))

    def step(self, number, rows=16):
        g = torch.Generator().manual_seed(number)
        images, noise = torch.randn(2, rows, 3, 6, 6, generator=g)
        sigma = (torch.randn(rows, 1, 1, 1, generator=g) * 0.6 - 0.4).exp()
        mine = slice(self.rank, None, self.world)
        loss = self.loss(images[mine].cumsum(-1) / 3, sigma[mine], noise[mine])
        self.optimizer.zero_grad()
        loss.backward()
        loss = loss.detach() / self.world
        if self.world > 1:
            for p in self.net.parameters():
                dist.all_reduce(p.grad)
                p.grad /= self.world
            dist.all_reduce(loss)
        self.optimizer.step()
        self.follow(len(images[mine]) if args.faulty else rows)
        return loss.item()


rank, world = 0, 1
if not args.one:
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
trainer = Trainer(rank, world)
for step in range(1, 7):
    loss = trainer.step(step)
    if rank == 0:
        print(f"step {step} loss {loss:.7f}", flush=True)
if args.save:
    ema = copy.deepcopy(trainer.net)
    for p, mine in zip(ema.parameters(), trainer.average):
        p.data.copy_(mine)
    state = {**trainer.net.state_dict(), **{f"ema.{k}": v for k, v in ema.state_dict().items()}}
    torch.save(state, os.path.join(args.save, f"rank{rank}.pt"))
if not args.one:
    dist.destroy_process_group()
