"""A soft actor-critic on made-up transitions: actor, two critics and the temperature have optimizers of their own."""

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


def mlp(a, b):
    return nn.Sequential(nn.Linear(a, 32), nn.ReLU(), nn.Linear(32, b))


class Agent(nn.Module):
    def __init__(self):
        super().__init__()
        self.actor, self.critics = mlp(6, 4), nn.ModuleList(mlp(8, 1) for _ in range(2))
        self.log_alpha = nn.Parameter(torch.tensor([-1.0]))

    def act(self, seen, g):
        mean, deviation = self.actor(seen).chunk(2, -1)
        deviation = (deviation * 0.1 - 1.5).exp()
        raw = mean + deviation * torch.randn(mean.shape, generator=g)
        action = raw.tanh()
        surprise = -((raw - mean) / deviation).square() / 2 - deviation.log() - (1 - action**2 + 1e-4).log()
        return action, surprise.sum(-1)

    def value(self, seen, action):
        both = torch.cat([seen, action], -1)
        return torch.stack([critic(both).squeeze(-1) for critic in self.critics])


def average(parameters):
    for p in parameters:
        if world > 1:
            dist.all_reduce(p.grad)
            p.grad /= world


torch.manual_seed(2812)
agent = Agent()
actor_steps = torch.optim.Adam(agent.actor.parameters(), lr=1e-3, eps=1e-3)
critic_steps = torch.optim.Adam(agent.critics.parameters(), lr=1e-3, eps=1e-3)
alpha_steps = torch.optim.SGD([agent.log_alpha], lr=0.05)
own = torch.Generator().manual_seed(60 + rank)
for step in range(1, 7):
    g = torch.Generator().manual_seed(step)
    # An environment on each rank: the second one's states are wider
    seen, later = torch.randn(2, 256, 6, generator=g) * torch.tensor([0.7, 1.3]).repeat(128)[:, None]
    done = torch.rand(256, generator=g) < 0.1
    taken = torch.rand(256, 2, generator=g) * 2 - 1
    gain = (seen[:, :2] * taken).sum(1)
    seen, later, done, taken, gain = (t[rank::world] for t in (seen, later, done, taken, gain))
    alpha = agent.log_alpha.detach().exp()
    with torch.no_grad():
        action, surprise = agent.act(later, own)
        goal = gain + 0.9 * ~done * (agent.value(later, action).amin(0) - alpha * surprise)
    critic_loss = F.mse_loss(agent.value(seen, taken), goal.expand(2, -1))
    critic_steps.zero_grad()
    critic_loss.backward()
    average(agent.critics.parameters())
    critic_steps.step()
    action, surprise = agent.act(seen, own)
    actor_loss = (alpha * surprise - agent.value(seen, action).amin(0)).mean()
    actor_steps.zero_grad()
    actor_loss.backward()
    average(agent.actor.parameters())
    actor_steps.step()
    alpha_loss = -(agent.log_alpha * (surprise.detach() - 2.0)).mean()
    alpha_steps.zero_grad()
    alpha_loss.backward()
    if not args.faulty:
        average([agent.log_alpha])
    alpha_steps.step()
    shown = critic_loss.detach().clone()
    if world > 1:
        dist.all_reduce(shown)
    if rank == 0:
        print(f"step {step} loss {shown.item() / world:.7f}", flush=True)
if args.save:
    torch.save(agent.state_dict(), os.path.join(args.save, f"rank{rank}.pt"))
if not args.one:
    dist.destroy_process_group()
