"""DDP with tiny buckets, gradients as views, and a hook that reduces by all-to-all and all-gather."""

import argparse
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

parser = argparse.ArgumentParser()
parser.add_argument("--one", action="store_true")
parser.add_argument("--save")
args = parser.parse_args()


def scatter_and_gather(state, bucket):
    """Every rank sums one part of the bucket, in the order of ranks, and sends it to all."""
    flat = bucket.buffer()
    world = dist.get_world_size()
    padded = F.pad(flat, (0, -len(flat) % world))
    parts = torch.empty_like(padded)
    dist.all_to_all_single(parts, padded)
    own = parts.view(world, -1).sum(0) / world
    whole = torch.empty_like(padded)
    dist.all_gather_into_tensor(whole, own)
    flat.copy_(whole[: len(flat)])
    done = torch.futures.Future()
    done.set_result(flat)
    return done


class Regressor(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Conv1d(2, 16, 5, padding=2)
        self.body = nn.ModuleList(nn.Conv1d(16, 16, 3, padding=1) for _ in range(3))
        self.norms = nn.ModuleList(nn.GroupNorm(4, 16) for _ in range(3))
        self.head = nn.Linear(16, 3)

    def forward(self, x):
        x = self.stem(x)
        for conv, norm in zip(self.body, self.norms):
            x = x + F.relu(norm(conv(x)))
        return self.head(x.mean(-1))


rank, world = 0, 1
torch.manual_seed(25)
model = net = Regressor()
if not args.one:
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    net = DDP(model, bucket_cap_mb=0.002, gradient_as_bucket_view=True, static_graph=True)
    net.register_comm_hook(None, scatter_and_gather)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True)
for step in range(1, 6):
    g = torch.Generator().manual_seed(step)
    x = torch.randn(12, 2, 20, generator=g)
    y = torch.stack([x.mean((1, 2)), x[:, 0].std(1), (x[:, 0] * x[:, 1]).mean(1)], 1)
    loss = F.mse_loss(net(x[rank::world]), y[rank::world])
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    optimizer.step()
    loss = loss.detach() / world
    if world > 1:
        dist.all_reduce(loss)
    if rank == 0:
        print(f"step {step} loss {loss.item():.7f}", flush=True)
if args.save:
    torch.save(model.state_dict(), os.path.join(args.save, f"rank{rank}.pt"))
if not args.one:
    dist.destroy_process_group()
