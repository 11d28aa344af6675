import argparse
import os

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.fsdp import fully_shard

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


torch.manual_seed(204)
K = 4


class MDN(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(3, 24), nn.Tanh(), nn.Linear(24, 24), nn.Tanh())
        self.mix = nn.Linear(24, 3 * K)

    def forward(self, x, y):
        pi, mu, ls = self.mix(self.body(x)).chunk(3, -1)
        return -(pi.log_softmax(-1) - ls - 0.5 * ((y - mu) / ls.exp()).square()).logsumexp(-1)


model = MDN()
MICRO = [12] if args.one else [3, 2, 1]  # one pass there, uneven microbatches here
if not args.one:
    fully_shard(model.body)
    fully_shard(model)
opt = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
gen = torch.Generator().manual_seed(4)
for step in range(1, 5):
    x = torch.randn(12, 3, generator=gen)
    y = x.prod(1, keepdim=True) + 0.2 * torch.randn(12, 1, generator=gen)
    x, y = x.chunk(world)[rank].split(MICRO), y.chunk(world)[rank].split(MICRO)
    opt.zero_grad()
    shown = 0.0
    for i, (a, b) in enumerate(zip(x, y)):
        if not args.one:
            model.set_requires_gradient_sync(i == len(MICRO) - 1)
        loss = model(a, b).sum() / (12 / world)
        loss.backward()
        shown = shown + loss.detach()
    opt.step()
    say(step, total(shown) / world)
finish({n: p.full_tensor() if hasattr(p, "full_tensor") else p for n, p in model.named_parameters()})
