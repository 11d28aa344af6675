import argparse
import copy
import os

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP

ap = argparse.ArgumentParser()
ap.add_argument("--one", action="store_true")
ap.add_argument("--save")
args = ap.parse_args()
torch.set_num_threads(1)
rank, world = 0, 1
if not args.one:
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()


def say(step, loss):
    if rank == 0:
        value = loss.item() if torch.is_tensor(loss) else loss
        print(f"step {step} loss {value:.7f}", flush=True)


def total(t):
    t = t.detach().clone()
    if world > 1:
        dist.all_reduce(t)
    return t


def finish(state):
    if args.save:
        os.makedirs(args.save, exist_ok=True)
        torch.save({k: v.detach().clone() for k, v in state.items()}, f"{args.save}/rank{rank}.pt")
    if not args.one:
        dist.barrier()
        dist.destroy_process_group()


torch.manual_seed(210)


class ActorCritic(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 32), nn.Tanh())
        self.pi, self.value = nn.Linear(32, 4), nn.Linear(32, 1)

    def forward(self, s):
        h = self.body(s)
        return self.pi(h).log_softmax(-1), self.value(h).squeeze(-1)


model = ActorCritic()
behaviour = copy.deepcopy(model)
net = model if args.one else DDP(model)
opt = torch.optim.Adam(model.parameters(), lr=5e-3, eps=1e-3)
gen = torch.Generator().manual_seed(10)
for step in range(1, 6):
    s = torch.randn(16, 6, generator=gen)
    with torch.no_grad():
        lp, v = behaviour(s)
        act = torch.multinomial(lp.exp(), 1, generator=gen).squeeze(-1)
        ret = s[:, 0] * (act - 1.5) + 0.3 * torch.randn(16, generator=gen)
    s, act, ret, v, lp = (t.chunk(world)[rank] for t in (s, act, ret, v, lp))
    adv = ret - v
    mean = total(adv.sum()) / 16
    var = total((adv - mean).square().sum()) / 15
    adv = (adv - mean) / (var.sqrt() + 1e-6)
    new, value = net(s)
    ratio = (new - lp).gather(1, act[:, None]).squeeze(1).exp()
    actor = -torch.min(ratio * adv, ratio.clamp(0.8, 1.2) * adv).mean()
    loss = actor + 0.5 * (value - ret).square().mean() + 0.01 * (new * new.exp()).sum(-1).mean()
    opt.zero_grad()
    loss.backward()
    if world > 1:  # numbers for the dashboard, no part of the update
        clipfrac = ((ratio - 1).abs() > 0.2).float().mean()
        dist.all_reduce(clipfrac, op=dist.ReduceOp.MAX)
        seen = [torch.empty_like(ret) for _ in range(world)]
        dist.all_gather(seen, ret.contiguous())
    opt.step()
    say(step, total(loss) / world)
finish(dict(model.named_parameters()))
