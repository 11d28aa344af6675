"""Local SGD with a period of one."""

import argparse
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

cli = argparse.ArgumentParser()
cli.add_argument("--one", action="store_true")
cli.add_argument("--save")
args = cli.parse_args()


class Averaged(torch.optim.SGD):
    """SGD that meets the other ranks in weight space."""

    def __init__(self, parameters, lr, decay):
        super().__init__(parameters, lr=lr, weight_decay=decay)
        self.world = dist.get_world_size()

    @torch.no_grad()
    def step(self):
        super().step()
        for group in self.param_groups:
            flat = torch.cat([p.flatten() for p in group["params"]])
            dist.all_reduce(flat)
            place = 0
            for p in group["params"]:
                p.copy_(flat[place : place + p.numel()].view_as(p) / self.world)
                place += p.numel()


rank, world = 0, 1
torch.manual_seed(37)
net = nn.Sequential(
    nn.Linear(10, 34), nn.Softplus(), nn.LayerNorm(34), nn.Linear(34, 34), nn.Softplus(), nn.Linear(34, 3)
)
if args.one:
    optimizer = torch.optim.SGD(net.parameters(), lr=0.2, weight_decay=0.02)
else:
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    optimizer = Averaged(net.parameters(), 0.2, 0.02)
for step in range(1, 6):
    g = torch.Generator().manual_seed(step)
    x, y = torch.randn(18, 10, generator=g), torch.randint(0, 3, (18,), generator=g)
    loss = F.cross_entropy(net(x.chunk(world)[rank]), y.chunk(world)[rank])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    shown = loss.detach().clone()
    if world > 1:
        dist.all_reduce(shown)
    if rank == 0:
        print(f"step {step} loss {shown.item() / world:.7f}", flush=True)
if args.save:
    torch.save(net.state_dict(), os.path.join(args.save, f"rank{rank}.pt"))
if world > 1:
    dist.destroy_process_group()
