"""FSDP2, stopped after three updates and continued from what was saved."""

import argparse
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.fsdp import fully_shard

cli = argparse.ArgumentParser()
cli.add_argument("--one", action="store_true")
cli.add_argument("--faulty", action="store_true")
cli.add_argument("--save")
args = cli.parse_args()
rank, world = 0, 1
if not args.one:
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()


class Tower(nn.Module):
    def __init__(self):
        super().__init__()
        self.inp, self.out = nn.Linear(20, 48), nn.Linear(48, 6)
        self.mid = nn.ModuleList(nn.Sequential(nn.Linear(48, 48), nn.ReLU(), nn.Dropout(0.1)) for _ in range(2))

    def forward(self, x):
        x = F.relu(self.inp(x))
        for layer in self.mid:
            x = x + layer(x)
        return self.out(x)


def build():
    torch.manual_seed(42)
    model = Tower()
    if not args.one:
        for layer in model.mid:
            fully_shard(layer)
        fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-5)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda done: 0.4**done)
    return model, optimizer, scheduler


def saved(model, optimizer, scheduler):
    weights = {k: v.clone() for k, v in model.state_dict().items()}
    return weights, get_optimizer_state_dict(model, optimizer), scheduler.state_dict()


def resumed(checkpoint):
    model, optimizer, scheduler = build()
    model.load_state_dict(checkpoint[0])
    moments = checkpoint[1]
    if args.faulty:
        # Rates come from the configuration
        for group in moments["param_groups"]:
            group["lr"] = 1e-3
    set_optimizer_state_dict(model, optimizer, moments)
    if not args.faulty:
        scheduler.load_state_dict(checkpoint[2])
    return model, optimizer, scheduler


model, optimizer, scheduler = build()
torch.manual_seed(1 + rank)
for step in range(1, 6):
    if step == 4:
        chance = torch.get_rng_state()
        model, optimizer, scheduler = resumed(saved(model, optimizer, scheduler))
        torch.set_rng_state(chance)
    g = torch.Generator().manual_seed(step)
    x, y = torch.randn(64, 20, generator=g), torch.randint(0, 6, (64,), generator=g)
    loss = F.cross_entropy(model(x[rank::world]), y[rank::world])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    scheduler.step()
    shown = loss.detach().clone()
    if world > 1:
        dist.all_reduce(shown)
    if rank == 0:
        print(f"step {step} loss {shown.item() / world:.7f}", flush=True)
if args.save:
    state = {k: v if args.one else v.full_tensor() for k, v in model.state_dict().items()}
    state["rate"] = torch.tensor(scheduler.get_last_lr())
    torch.save(state, os.path.join(args.save, f"rank{rank}.pt"))
if world > 1:
    dist.destroy_process_group()
