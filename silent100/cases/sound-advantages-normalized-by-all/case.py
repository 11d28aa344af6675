"""PPO on made-up episodes: two passes over the same data, the second with ratios that are not one."""

import os
import sys

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

ONE = "--one" in sys.argv
if not ONE:
    dist.init_process_group("gloo")
RANK, WORLD = (0, 1) if ONE else (dist.get_rank(), dist.get_world_size())


class Agent(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(9, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh())
        self.policy, self.value = nn.Linear(32, 4), nn.Linear(32, 1)

    def forward(self, x):
        h = self.body(x)
        return self.policy(h).log_softmax(-1), self.value(h).squeeze(-1)


def over_all(x):
    """Mean and deviation over every rank's numbers."""
    sums = torch.stack([x.sum(), x.square().sum(), torch.tensor(float(x.numel()))]).double()
    if WORLD > 1:
        dist.all_reduce(sums)
    mean = sums[0] / sums[2]
    return mean.float(), (sums[1] / sums[2] - mean.square()).sqrt().float()


def episodes(step):
    g = torch.Generator().manual_seed(step)
    x, actions = torch.randn(32, 9, generator=g), torch.randint(0, 4, (32,), generator=g)
    returns = x[:, 0] + (actions == 2) + 0.3 * torch.randn(32, generator=g)
    return (t[RANK::WORLD] for t in (x, actions, returns))


torch.manual_seed(35)
agent = Agent()
optimizer = torch.optim.SGD(agent.parameters(), lr=0.2)
step = 0
for iteration in range(3):
    x, actions, returns = episodes(iteration)
    with torch.no_grad():
        logs, values = agent(x)
        old = logs.gather(1, actions[:, None])[:, 0]
        mean, deviation = over_all(returns - values)
        advantages = (returns - values - mean) / (deviation + 1e-6)
    for _ in range(2):
        step += 1
        logs, values = agent(x)
        ratio = (logs.gather(1, actions[:, None])[:, 0] - old).exp()
        gain = torch.minimum(ratio * advantages, ratio.clamp(0.9, 1.1) * advantages)
        entropy = -(logs.exp() * logs).sum(-1)
        loss = (0.5 * F.mse_loss(values, returns) - gain.mean() - 0.01 * entropy.mean()) / WORLD
        optimizer.zero_grad()
        loss.backward()
        shown = loss.detach().clone()
        if WORLD > 1:
            for p in agent.parameters():
                dist.all_reduce(p.grad)
            dist.all_reduce(shown)
        optimizer.step()
        if RANK == 0:
            print(f"step {step} loss {shown.item():.7f}", flush=True)
if "--save" in sys.argv:
    torch.save(agent.state_dict(), os.path.join(sys.argv[sys.argv.index("--save") + 1], f"rank{RANK}.pt"))
if WORLD > 1:
    dist.destroy_process_group()
