import argparse
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP


def mlp(*sizes):
    layers = []
    for a, b in zip(sizes, sizes[1:]):
        layers += [nn.Linear(a, b), nn.LeakyReLU(0.2)]
    return nn.Sequential(*layers[:-1])


class Gan:
    def __init__(self, distributed):
        torch.manual_seed(21)
        self.plain = {"generator": mlp(6, 32, 32, 4), "critic": mlp(4, 32, 32, 1)}
        self.generator, self.critic = (DDP(m) if distributed else m for m in self.plain.values())
        self.for_generator = torch.optim.SGD(self.plain["generator"].parameters(), lr=0.05)
        self.for_critic = torch.optim.SGD(self.plain["critic"].parameters(), lr=0.05, momentum=0.5)

    def train_critic(self, real, z):
        self.for_critic.zero_grad()
        with torch.no_grad():
            fake = self.generator(z)
        both = self.critic(torch.cat([real, fake]))
        good, bad = both.split(len(real))
        loss = F.softplus(-good).mean() + F.softplus(bad).mean()
        loss.backward()
        self.for_critic.step()
        return loss.detach()

    def train_generator(self, z):
        self.for_generator.zero_grad()
        # Gradients of this loss pile up in the critic and are zeroed before its next turn
        loss = F.softplus(-self.critic(self.generator(z))).mean()
        loss.backward()
        self.for_generator.step()
        return loss.detach()


cli = argparse.ArgumentParser()
cli.add_argument("--one", action="store_true")
cli.add_argument("--save")
args = cli.parse_args()
rank, world = 0, 1
if not args.one:
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
gan = Gan(not args.one)
for step in range(1, 6):
    g = torch.Generator().manual_seed(step)
    real, z = torch.randn(16, 4, generator=g) @ torch.tril(torch.ones(4, 4)), torch.randn(16, 6, generator=g)
    real, z = real[rank::world], z[rank::world]
    total = gan.train_critic(real, z) + gan.train_generator(z)
    if world > 1:
        dist.all_reduce(total)
    if rank == 0:
        print(f"step {step} loss {total.item() / world:.7f}", flush=True)
if args.save:
    state = {f"{name}.{k}": v for name, m in gan.plain.items() for k, v in m.state_dict().items()}
    torch.save(state, os.path.join(args.save, f"rank{rank}.pt"))
if world > 1:
    del gan
    dist.destroy_process_group()
