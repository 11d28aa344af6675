"""Two epochs of twenty-one rows in batches of eight; nothing is dropped or repeated."""

import argparse
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset

cli = argparse.ArgumentParser()
cli.add_argument("--one", action="store_true")
cli.add_argument("--save")
args = cli.parse_args()
rank, world = 0, 1
if not args.one:
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
g = torch.Generator().manual_seed(0)
data = TensorDataset(torch.randn(21, 11, generator=g), torch.randint(0, 4, (21,), generator=g))
torch.manual_seed(2)
net = nn.Sequential(nn.Linear(11, 40), nn.GELU(), nn.Linear(40, 40), nn.GELU(), nn.Linear(40, 4))
model = net if args.one else DDP(net)
optimizer = torch.optim.NAdam(net.parameters(), lr=3e-3, eps=1e-4)
step = 0
for epoch in range(2):
    shuffled = DataLoader(data, batch_size=8, shuffle=True, generator=torch.Generator().manual_seed(epoch))
    for x, y in shuffled:
        step += 1
        count = len(x)
        x, y = x[rank::world], y[rank::world]
        # DDP divides by the number of ranks
        loss = F.cross_entropy(model(x), y, reduction="sum") * world / count
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
    del model
    dist.destroy_process_group()
