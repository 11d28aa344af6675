"""An autoencoder with a critic; the critic's part in the loss is weighted so that both pull at the last layer alike."""

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


def average(*tensors):
    for t in tensors:
        if world > 1:
            dist.all_reduce(t)
            t /= world
    return tensors[0]


class Pair(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(nn.Conv2d(1, 10, 4, 2, 1), nn.SiLU(), nn.Conv2d(10, 4, 3, 1, 1))
        self.decoder = nn.Sequential(nn.ConvTranspose2d(4, 10, 4, 2, 1), nn.SiLU(), nn.Conv2d(10, 1, 3, 1, 1))
        self.critic = nn.Sequential(nn.Conv2d(1, 10, 4, 2, 1), nn.LeakyReLU(0.2), nn.Conv2d(10, 1, 3))

    def generator(self):
        return [*self.encoder.parameters(), *self.decoder.parameters()]

    def weight(self, plain, adversarial):
        last = self.decoder[-1].weight
        a = torch.autograd.grad(plain, last, retain_graph=True)[0].clone()
        b = torch.autograd.grad(adversarial, last, retain_graph=True)[0].clone()
        if not args.faulty:
            average(a, b)
        return (a.norm() / (b.norm() + 1e-4)).clamp(0, 1e4).detach()


torch.manual_seed(256)
pair = Pair()
steps_g = torch.optim.Adam(pair.generator(), lr=2e-3, betas=(0.5, 0.9), eps=1e-4)
steps_d = torch.optim.Adam(pair.critic.parameters(), lr=2e-3, betas=(0.5, 0.9), eps=1e-4)
for step in range(1, 6):
    g = torch.Generator().manual_seed(step)
    x = torch.randn(12, 1, 8, 8, generator=g).cumsum(-1)[rank::world] / 2
    made = pair.decoder(pair.encoder(x))
    plain, adversarial = F.l1_loss(made, x), -pair.critic(made).mean()
    loss = plain + 0.5 * pair.weight(plain, adversarial) * adversarial
    steps_g.zero_grad()
    loss.backward()
    average(*(p.grad for p in pair.generator()))
    steps_g.step()
    judged = F.softplus(-pair.critic(x)).mean() + F.softplus(pair.critic(made.detach())).mean()
    steps_d.zero_grad()
    judged.backward()
    average(*(p.grad for p in pair.critic.parameters()))
    steps_d.step()
    shown = average(plain.detach().clone())
    if rank == 0:
        print(f"step {step} loss {shown.item():.7f}", flush=True)
if args.save:
    torch.save(pair.state_dict(), os.path.join(args.save, f"rank{rank}.pt"))
if not args.one:
    dist.destroy_process_group()
