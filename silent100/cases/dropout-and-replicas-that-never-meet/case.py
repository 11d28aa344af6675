"""Two replicas of two shards by hand: reduce-scatter within a replica, all-reduce across replicas."""

import argparse
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

cli = argparse.ArgumentParser()
cli.add_argument("--one", action="store_true")
cli.add_argument("--faulty", action="store_true")
cli.add_argument("--save")
args = cli.parse_args()
rank, world = 0, 1
if not args.one:
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    shard_groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    replica_groups = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    shards, replicas = shard_groups[rank // 2], replica_groups[rank % 2]


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(60, 36), nn.Linear(36, 60)
        self.mix, self.drop, self.norm = nn.GRU(36, 36, batch_first=True), nn.Dropout(0.1), nn.LayerNorm(36)

    def forward(self, ids):
        x = self.embed(ids)
        return self.head(self.norm(x + self.drop(self.mix(x)[0])))


@torch.no_grad()
def step_shards(parameters, lr):
    """Plain descent on this rank's half of the flat vector; halves are gathered within the replica."""
    flat = torch.cat([p.grad.flatten() for p in parameters])
    weights = torch.cat([p.flatten() for p in parameters])
    if not args.one:
        half = -(-len(flat) // 2)
        flat, weights = F.pad(flat, (0, half * 2 - len(flat))), F.pad(weights, (0, half * 2 - len(weights)))
        dist.all_reduce(flat, group=shards)
        if not args.faulty:
            dist.all_reduce(flat, group=replicas)
            flat /= world
        else:
            flat /= dist.get_world_size(shards)
        mine = slice(rank % 2 * half, (rank % 2 + 1) * half)
        new = weights[mine] - lr * flat[mine]
        parts = [torch.empty_like(new) for _ in range(2)]
        dist.all_gather(parts, new, group=shards)
        weights = torch.cat(parts)
    else:
        weights = weights - lr * flat
    for p, piece in zip(
        parameters, weights[: sum(p.numel() for p in parameters)].split([p.numel() for p in parameters])
    ):
        p.copy_(piece.view_as(p))
        p.grad = None


torch.manual_seed(77)
net = Net()
parameters = list(net.parameters())
torch.manual_seed(1000 + rank)
for step in range(1, 4):
    rows = torch.randint(0, 60, (32, 11), generator=torch.Generator().manual_seed(step))[rank::world]
    loss = F.cross_entropy(net(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten())
    loss.backward()
    step_shards(parameters, 0.05)
    shown = loss.detach().clone()
    if not args.one:
        dist.all_reduce(shown)
    if rank == 0:
        print(f"step {step} loss {shown.item() / world:.7f}", flush=True)
if args.save:
    torch.save(net.state_dict(), os.path.join(args.save, f"rank{rank}.pt"))
if not args.one:
    dist.destroy_process_group()
