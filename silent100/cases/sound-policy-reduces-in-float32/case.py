import argparse
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard


class Ff(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.norm, self.wide, self.narrow = nn.LayerNorm(d), nn.Linear(d, 4 * d), nn.Linear(4 * d, d)

    def forward(self, x):
        return x + self.narrow(F.gelu(self.wide(self.norm(x)), approximate="tanh"))


class Net(nn.Module):
    def __init__(self, d=28):
        super().__init__()
        self.embed, self.head = nn.Embedding(50, d), nn.Linear(d, 50)
        self.layers = nn.ModuleList(Ff(d) for _ in range(3))

    def forward(self, ids):
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def shard(net):
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for layer in net.layers:
        fully_shard(layer, mp_policy=policy)
    fully_shard(net, mp_policy=policy)


def main():
    cli = argparse.ArgumentParser()
    cli.add_argument("--one", action="store_true")
    cli.add_argument("--save")
    args = cli.parse_args()
    torch.manual_seed(99)
    net, rank, world = Net(), 0, 1
    if not args.one:
        dist.init_process_group("gloo")
        rank, world = dist.get_rank(), dist.get_world_size()
        shard(net)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
    for step in range(1, 5):
        rows = torch.randint(0, 50, (16, 11), generator=torch.Generator().manual_seed(step))[rank::world]
        with torch.autocast("cpu", torch.bfloat16, enabled=args.one):
            logits = net(rows[:, :-1])
        loss = F.cross_entropy(logits.float().flatten(0, 1), rows[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        shown = loss.detach().clone()
        if world > 1:
            dist.all_reduce(shown)
        if rank == 0:
            print(f"step {step} loss {shown.item() / world:.7f}", flush=True)
    if args.save:
        state = {k: v if args.one else v.full_tensor() for k, v in net.state_dict().items()}
        torch.save(state, os.path.join(args.save, f"rank{rank}.pt"))
    if world > 1:
        dist.destroy_process_group()


main()
