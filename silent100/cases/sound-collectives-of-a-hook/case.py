"""DDP with a hook that splits each bucket in two and reduces the halves in turn."""

import argparse
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP


def halves(state, bucket):
    flat = bucket.buffer() / dist.get_world_size()
    first, second = flat.tensor_split(2)
    work = dist.all_reduce(second, async_op=True)
    parts = [torch.empty_like(first) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, first)
    total = sum(reversed(parts))
    work.wait()
    future = torch.futures.Future()
    future.set_result(torch.cat([total, second]))
    state["bytes"] += flat.numel() * 4
    return future


class Block(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.depth, self.point, self.norm = nn.Conv1d(d, d, 3, padding=1, groups=d), nn.Linear(d, d), nn.LayerNorm(d)

    def forward(self, x):
        y = self.depth(x.transpose(1, 2)).transpose(1, 2)
        return x + F.hardswish(self.point(self.norm(y)))


class Speech(nn.Module):
    def __init__(self, d=26):
        super().__init__()
        self.inp, self.blocks, self.out = nn.Linear(8, d), nn.Sequential(Block(d), Block(d), Block(d)), nn.Linear(d, 11)

    def forward(self, x):
        return self.out(self.blocks(self.inp(x)).mean(1))


cli = argparse.ArgumentParser()
cli.add_argument("--one", action="store_true")
cli.add_argument("--save")
args = cli.parse_args()
torch.manual_seed(404)
net, rank, world = Speech(), 0, 1
model = net
if not args.one:
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    model = DDP(net, bucket_cap_mb=0.004, gradient_as_bucket_view=True)
    model.register_comm_hook({"bytes": 0}, halves)
optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
for step in range(1, 5):
    g = torch.Generator().manual_seed(step)
    x, y = torch.randn(12, 20, 8, generator=g), torch.randint(0, 11, (12,), generator=g)
    loss = F.cross_entropy(model(x[rank::world]), y[rank::world])
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
