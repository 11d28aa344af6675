import argparse
import os

import torch
import torch.distributed as dist
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--one", action="store_true")
parser.add_argument("--faulty", action="store_true")
parser.add_argument("--save")
args = parser.parse_args()
if not args.one:
    dist.init_process_group("gloo")
rank, world = (0, 1) if args.one else (dist.get_rank(), dist.get_world_size())
torch.manual_seed(45)


def total(value):
    value = value.detach().clone()
    if world > 1:
        dist.all_reduce(value)
    return value


def net():
    return nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 3))


class Agent(nn.Module):
    def __init__(self):
        super().__init__()
        self.policy, self.value, self.actor = net(), nn.Linear(4, 1), net()
        self.actor.requires_grad_(False)
        self.refresh(self.policy.state_dict())

    def refresh(self, weights):
        self.actor.load_state_dict(weights)

    def rollout(self, seen, chance):
        logits = self.actor(seen)
        action = (logits + chance).argmax(-1)
        return action, logits.log_softmax(-1).gather(1, action[:, None])[:, 0]


model = Agent()
opt = torch.optim.Adam([*model.policy.parameters(), *model.value.parameters()], lr=0.03, eps=1e-5)
for step in range(1, 9):
    g = torch.Generator().manual_seed(900 + step)
    seen = torch.randn(16, 4, generator=g)
    chance = -torch.rand(16, 3, generator=g).clamp(1e-6, 1 - 1e-6).log().neg().log()
    rows = slice(rank * 16 // world, (rank + 1) * 16 // world)
    seen, chance = seen[rows], chance[rows]
    action, before = model.rollout(seen, chance)
    reward = seen.gather(1, action[:, None])[:, 0] - 0.3 * action
    value = model.value(seen)[:, 0]
    gain = (reward - value).detach()
    now = model.policy(seen).log_softmax(-1).gather(1, action[:, None])[:, 0]
    ratio = (now - before).exp()
    surrogate = torch.minimum(ratio * gain, ratio.clamp(0.8, 1.2) * gain)
    loss = (0.5 * (value - reward).square() - surrogate).sum() / 16
    opt.zero_grad()
    loss.backward()
    for p in (p for p in model.parameters() if p.grad is not None):
        p.grad = total(p.grad)
    early = args.faulty and rank == 1
    if early:
        model.refresh(model.policy.state_dict())
    opt.step()
    if not early:
        model.refresh(model.policy.state_dict())
    shown = total(loss).item()
    if rank == 0:
        print(f"step {step} loss {shown:.7f}", flush=True)

if args.save:
    os.makedirs(args.save, exist_ok=True)
    torch.save(model.state_dict(), f"{args.save}/rank{rank}.pt")
if not args.one:
    dist.destroy_process_group()
