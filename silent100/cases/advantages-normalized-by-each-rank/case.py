import argparse
import os

import torch
import torch.distributed as dist
import torch.nn as nn

cli = argparse.ArgumentParser()
cli.add_argument("--one", action="store_true")
cli.add_argument("--faulty", action="store_true")
cli.add_argument("--save")
args = cli.parse_args()


class Policy(nn.Module):
    """A Gaussian policy with a learned deviation."""

    def __init__(self):
        super().__init__()
        self.mean = nn.Sequential(nn.Linear(7, 40), nn.Tanh(), nn.Linear(40, 2))
        self.log_std = nn.Parameter(torch.full((2,), -0.5))

    def log_prob(self, x, action):
        return torch.distributions.Normal(self.mean(x), self.log_std.exp()).log_prob(action).sum(-1)


class Whitener:
    def __init__(self, world):
        self.world = world

    def __call__(self, advantages):
        moments = torch.stack([advantages.mean(), advantages.square().mean()])
        if self.world > 1:
            dist.all_reduce(moments)
            moments /= self.world
        return (advantages - moments[0]) / (moments[1] - moments[0] ** 2 + 1e-6).sqrt()


def rollout(step, count=24):
    g = torch.Generator().manual_seed(step)
    x, action = torch.randn(count, 7, generator=g), torch.randn(count, 2, generator=g)
    return x, action, 3 + x.sum(1) - (action - x[:, :2]).square().sum(1)


rank, world = 0, 1
if not args.one:
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(8)
policy = Policy()
whiten = Whitener(1 if args.faulty else world)
optimizer = torch.optim.SGD(policy.parameters(), lr=0.05)
for step in range(1, 6):
    x, action, reward = (t.chunk(world)[rank] for t in rollout(step))
    loss = -(policy.log_prob(x, action) * whiten(reward)).mean()
    optimizer.zero_grad()
    loss.backward()
    shown = loss.detach().clone()
    if world > 1:
        for p in policy.parameters():
            dist.all_reduce(p.grad)
            p.grad /= world
        dist.all_reduce(shown)
    optimizer.step()
    if rank == 0:
        print(f"step {step} loss {shown.item() / world:.7f}", flush=True)
if args.save:
    torch.save(policy.state_dict(), os.path.join(args.save, f"rank{rank}.pt"))
if world > 1:
    dist.destroy_process_group()
