"""FSDP2; optimizer state is allocated before training so that memory is known at once."""

import argparse
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.fsdp import fully_shard


def allocate_state(optimizer, reset):
    """Steps once with zero gradients and no learning rate, which makes the state and moves nothing."""
    rates = [(group["lr"], group["weight_decay"]) for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        group["lr"] = group["weight_decay"] = 0.0
        for p in group["params"]:
            p.grad = torch.zeros_like(p)
    optimizer.step()
    optimizer.zero_grad()
    for group, (lr, decay) in zip(optimizer.param_groups, rates):
        group["lr"], group["weight_decay"] = lr, decay
    if reset:
        for state in optimizer.state.values():
            state["step"].zero_()


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(48, 32)
        self.blocks = nn.ModuleList(nn.GRU(32, 32, batch_first=True) for _ in range(2))
        self.head = nn.Linear(32, 48)

    def forward(self, ids):
        x = self.embed(ids)
        for block in self.blocks:
            x = x + block(x)[0]
        return self.head(x)


cli = argparse.ArgumentParser()
cli.add_argument("--one", action="store_true")
cli.add_argument("--faulty", action="store_true")
cli.add_argument("--save")
args = cli.parse_args()
rank, world = 0, 1
if not args.one:
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(18)
net = Net()
if not args.one:
    fully_shard(net.head)
    fully_shard(net)
optimizer = torch.optim.AdamW(net.parameters(), lr=3e-3, eps=1e-6)
if not args.one:
    allocate_state(optimizer, reset=not args.faulty)
for step in range(1, 4):
    rows = torch.randint(0, 48, (8, 9), generator=torch.Generator().manual_seed(step))[rank::world]
    loss = F.cross_entropy(net(rows[:, :-1]).transpose(1, 2), rows[:, 1:])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    shown = loss.detach().clone()
    if not args.one:
        dist.all_reduce(shown)
    if rank == 0:
        print(f"step {step} loss {shown.item() / world:.7f}", flush=True)
if args.save:
    state = {k: v if args.one else v.full_tensor() for k, v in net.state_dict().items()}
    torch.save(state, os.path.join(args.save, f"rank{rank}.pt"))
if not args.one:
    dist.destroy_process_group()
