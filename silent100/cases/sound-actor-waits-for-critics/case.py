"""Twin delayed critics on made-up transitions; ranks reduce what has moved."""

import os
import sys

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.func import functional_call

ONE = "--one" in sys.argv
rank, world = 0, 1
if not ONE:
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()


def mlp(a, b):
    return nn.Sequential(nn.Linear(a, 28), nn.ELU(), nn.Linear(28, 28), nn.ELU(), nn.Linear(28, b))


class Agent(nn.Module):
    def __init__(self):
        super().__init__()
        self.actor, self.one, self.two = mlp(5, 2), mlp(7, 1), mlp(7, 1)

    def forward(self, seen):
        return self.actor(seen).tanh()

    def values(self, seen, action):
        both = torch.cat([seen, action], 1)
        return torch.cat([self.one(both), self.two(both)], 1)


class Target(nn.Module):
    """Calls an agent with weights that lie in a list."""

    def __init__(self, agent):
        super().__init__()
        self.names = [name for name, _ in agent.named_parameters()]
        self.list = [p.detach().clone() for p in agent.parameters()]
        self.calls = [agent]

    @torch.no_grad()
    def follow(self):
        for mine, p in zip(self.list, self.calls[0].parameters()):
            mine.lerp_(p, 0.1)

    @torch.no_grad()
    def goal(self, later, noise):
        agent, weights = self.calls[0], dict(zip(self.names, self.list))
        parts = lambda part: {k.split(".", 1)[1]: v for k, v in weights.items() if k.startswith(part)}  # noqa: E731
        action = (functional_call(agent.actor, parts("actor."), (later,)).tanh() + noise).clamp(-1, 1)
        both = torch.cat([later, action], 1)
        values = [functional_call(agent.one, parts(part), (both,)) for part in ("one.", "two.")]
        return torch.cat(values, 1).amin(1, keepdim=True)


def reduce_and_step(optimizer):
    for group in optimizer.param_groups:
        for p in group["params"]:
            if world > 1:
                dist.all_reduce(p.grad)
                p.grad /= world
    optimizer.step()


torch.manual_seed(1802)
agent = Agent()
target = Target(agent)
actor_steps = torch.optim.SGD(agent.actor.parameters(), lr=0.05)
critic_steps = torch.optim.RMSprop([*agent.one.parameters(), *agent.two.parameters()], lr=1e-3, eps=1e-2)
for step in range(1, 7):
    g = torch.Generator().manual_seed(step)
    seen, later = torch.randn(2, 32, 5, generator=g)
    action, noise = torch.randn(2, 32, 2, generator=g).clamp(-1, 1)
    gain = (seen[:, :2] * action).sum(1, keepdim=True)
    seen, later, action, noise, gain = (t.chunk(world)[rank] for t in (seen, later, action, noise, gain))
    loss = F.mse_loss(agent.values(seen, action), (gain + 0.9 * target.goal(later, noise * 0.1)).expand(-1, 2))
    critic_steps.zero_grad()
    loss.backward()
    reduce_and_step(critic_steps)
    if step % 2 == 0:
        actor_steps.zero_grad()
        (-agent.values(seen, agent(seen))[:, 0].mean()).backward()
        reduce_and_step(actor_steps)
        target.follow()
    shown = loss.detach().clone()
    if world > 1:
        dist.all_reduce(shown)
    if rank == 0:
        print(f"step {step} loss {shown.item() / world:.7f}", flush=True)
if "--save" in sys.argv:
    state = {**agent.state_dict(), **{f"target.{n}": t for n, t in zip(target.names, target.list)}}
    torch.save(state, os.path.join(sys.argv[sys.argv.index("--save") + 1], f"rank{rank}.pt"))
if not ONE:
    dist.destroy_process_group()
