import argparse
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
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


torch.manual_seed(214)
G = nn.Sequential(nn.Linear(4, 24), nn.LeakyReLU(0.2), nn.Linear(24, 2))
C = nn.Sequential(nn.Linear(2, 24), nn.LeakyReLU(0.2), nn.Linear(24, 1))
gnet, cnet = (G, C) if args.one else (DDP(G), DDP(C))
og = torch.optim.Adam(G.parameters(), lr=3e-3, betas=(0.5, 0.9), eps=1e-3)
oc = torch.optim.Adam(C.parameters(), lr=6e-3, betas=(0.5, 0.9), eps=1e-3)
gen = torch.Generator().manual_seed(14)
for step in range(1, 5):
    for _ in range(2):  # two critic updates to one of the generator
        real = torch.randn(8, 2, generator=gen) @ torch.tensor([[1.0, 0.5], [0.0, 0.4]]) + 1
        z = torch.empty(8, 4)
        if rank == 0:
            z = torch.randn(8, 4, generator=torch.Generator().manual_seed(step * 10 + _))
        if world > 1:
            dist.broadcast(z, 0)
        real, z = real.chunk(world)[rank], z.chunk(world)[rank]
        with torch.no_grad():
            fake = G(z)  # the bare module: nothing to reduce here
        r, f = cnet(torch.cat([real, fake])).chunk(2)
        lc = F.softplus(-r).mean() + F.softplus(f).mean()
        oc.zero_grad()
        lc.backward()
        oc.step()
    C.requires_grad_(False)
    lg = F.softplus(-C(gnet(z))).mean()
    og.zero_grad()
    lg.backward()
    og.step()
    C.requires_grad_(True)
    say(step, total(lc + lg) / world)
finish({**{"G." + n: p for n, p in G.named_parameters()}, **{"C." + n: p for n, p in C.named_parameters()}})
