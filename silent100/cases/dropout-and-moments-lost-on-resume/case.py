"""FSDP2 with dropout; the run is stopped after two updates. Optimizer state is part of what is saved at the end."""

import argparse
import copy
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.fsdp import fully_shard


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(66, 32), nn.Linear(32, 66)
        self.mlp = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(32), nn.Linear(32, 96), nn.ReLU(), nn.Dropout(0.1), nn.Linear(96, 32))
            for _ in range(2)
        )

    def forward(self, ids):
        x = self.embed(ids)
        for layer in self.mlp:
            x = x + layer(x)
        return self.head(x)


def whole(value):
    return value.full_tensor() if hasattr(value, "full_tensor") else value


def main():
    cli = argparse.ArgumentParser()
    cli.add_argument("--one", action="store_true")
    cli.add_argument("--faulty", action="store_true")
    cli.add_argument("--save")
    args = cli.parse_args()
    rank, world = 0, 1
    if not args.one:
        dist.init_process_group("gloo")
        rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(5)
    net = Net()
    if not args.one:
        for layer in net.mlp:
            fully_shard(layer)
        fully_shard(net)
    make = lambda: torch.optim.Adam(net.parameters(), lr=2e-4)  # noqa: E731
    optimizer = make()
    torch.manual_seed(70 + rank)
    for step in range(1, 5):
        if step == 3 and not args.one:
            saved = copy.deepcopy(get_optimizer_state_dict(net, optimizer))
            optimizer = make()
            if args.faulty:
                saved["state"] = {}
            else:
                set_optimizer_state_dict(net, optimizer, saved)
        rows = torch.randint(0, 66, (32, 9), generator=torch.Generator().manual_seed(step))[rank::world]
        loss = F.cross_entropy(net(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        shown = loss.detach().clone()
        if not args.one:
            dist.all_reduce(shown)
        if rank == 0:
            print(f"step {step} loss {shown.item() / world:.7f}", flush=True)
    if args.save:
        state = {k: whole(v) for k, v in net.state_dict().items()}
        for name, p in net.named_parameters():
            state |= {f"{key} of {name}": whole(v) for key, v in optimizer.state[p].items()}
        torch.save(state, os.path.join(args.save, f"rank{rank}.pt"))
    if not args.one:
        dist.destroy_process_group()


main()
