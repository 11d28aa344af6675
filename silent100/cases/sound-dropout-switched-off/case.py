"""parallelize_module; every rank seeds itself differently after initialization, and nothing random is left."""

import argparse
import os

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module


class Ff(nn.Module):
    def __init__(self, d=32):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(d), nn.Linear(d, 2 * d), nn.Linear(2 * d, d)
        self.drop = nn.Dropout(0.0)

    def forward(self, x):
        return x + self.drop(self.down(self.drop(torch.relu(self.up(self.norm(x))))))


cli = argparse.ArgumentParser()
cli.add_argument("--one", action="store_true")
cli.add_argument("--save")
args = cli.parse_args()
rank = 0
torch.manual_seed(3)
net = nn.Sequential(nn.Embedding(40, 32), Ff(), Ff(), nn.Linear(32, 40))
if not args.one:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    mesh = dist.init_device_mesh("cpu", (2,))
    for ff in net[1:3]:
        parallelize_module(ff, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
torch.manual_seed(rank)
optimizer = torch.optim.SGD(net.parameters(), lr=0.3, foreach=False)
for step in range(1, 5):
    rows = torch.randint(0, 40, (8, 9), generator=torch.Generator().manual_seed(step))
    loss = nn.functional.cross_entropy(net(rows[:, :-1]).transpose(1, 2), rows[:, 1:])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if rank == 0:
        print(f"step {step} loss {loss.item():.7f}", flush=True)
if args.save:
    state = {k: v.full_tensor() if isinstance(v, DTensor) else v for k, v in net.state_dict().items()}
    torch.save(state, os.path.join(args.save, f"rank{rank}.pt"))
if not args.one:
    dist.destroy_process_group()
