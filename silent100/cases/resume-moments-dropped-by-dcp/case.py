"""FSDP2 with torch.distributed.checkpoint; the job is preempted after two updates and goes on."""

import argparse
import os
import tempfile

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.fsdp import fully_shard

PREEMPTED_AFTER = 2


class Net(nn.Module):
    def __init__(self, vocab=60, dim=32):
        super().__init__()
        self.embed = nn.Embedding(vocab, dim)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(dim), nn.Linear(dim, 3 * dim), nn.GELU(), nn.Linear(3 * dim, dim))
            for _ in range(3)
        )
        self.head = nn.Linear(dim, vocab)

    def forward(self, ids):
        x = self.embed(ids)
        for layer in self.layers:
            x = x + layer(x)
        return self.head(x)


def make_optimizer(model):
    return torch.optim.AdamW(model.parameters(), lr=3e-3, eps=1e-6)


def save(folder, model, optimizer):
    dcp.save({"model": model.state_dict(), "optim": get_optimizer_state_dict(model, optimizer)}, checkpoint_id=folder)


def load(folder, model, optimizer, simple):
    if simple:
        state = {"model": model.state_dict(), "optim": optimizer.state_dict()}
        state["optim"].pop("param_groups")
        dcp.load(state, checkpoint_id=folder)
        model.load_state_dict(state["model"])
    else:
        state = {"model": model.state_dict(), "optim": get_optimizer_state_dict(model, optimizer)}
        dcp.load(state, checkpoint_id=folder)
        model.load_state_dict(state["model"])
        set_optimizer_state_dict(model, optimizer, state["optim"])


def shared_folder(one):
    name = [tempfile.mkdtemp()]
    if not one:
        dist.broadcast_object_list(name, src=0)
    return os.path.join(name[0], "step2")


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
    torch.manual_seed(0)
    model = Net()
    if not args.one:
        for layer in model.layers:
            fully_shard(layer)
        fully_shard(model)
    optimizer = make_optimizer(model)
    for step in range(1, 5):
        if step == PREEMPTED_AFTER + 1 and not args.one:
            folder = shared_folder(args.one)
            save(folder, model, optimizer)
            model.zero_grad()
            optimizer = make_optimizer(model)
            load(folder, model, optimizer, args.faulty)
        rows = torch.randint(0, 60, (8, 12), generator=torch.Generator().manual_seed(step))[rank::world]
        loss = F.cross_entropy(model(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        shown = loss.detach().clone()
        if not args.one:
            dist.all_reduce(shown)
        if rank == 0:
            print(f"step {step} loss {shown.item() / world:.7f}", flush=True)
    if args.save:
        state = {k: v if args.one else v.full_tensor() for k, v in model.state_dict().items()}
        torch.save(state, os.path.join(args.save, f"rank{rank}.pt"))
    if not args.one:
        dist.destroy_process_group()


main()
