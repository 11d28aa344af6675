"""Each rank owns the optimizer state of some parameters (ZeRO-1 by tensor); checkpoint after step 2, reload."""

import argparse
import os
import tempfile

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F


class Block(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.norm = nn.LayerNorm(d)
        self.mix = nn.Conv1d(d, d, 3, padding=1, groups=4)
        self.fc = nn.Linear(d, d)

    def forward(self, x):
        return x + self.fc(torch.tanh(self.mix(self.norm(x).transpose(1, 2)).transpose(1, 2)))


class Net(nn.Module):
    def __init__(self, d=32):
        super().__init__()
        self.embed = nn.Embedding(33, d)
        self.blocks = nn.ModuleList([Block(d), Block(d)])
        self.norm = nn.LayerNorm(d)
        self.head = nn.Linear(d, 8)

    def forward(self, x):
        x = self.embed(x)
        for b in self.blocks:
            x = b(x)
        return self.head(self.norm(x).mean(1))


def owner(name, world):
    return 0 if world == 1 or name.startswith(("embed", "blocks.0")) else 1


def save_checkpoint(path, model, opt, names, rank, world, faulty):
    mine = {n: opt.state[p]["momentum_buffer"] for n, p in names.items()}
    state = {"model": model.state_dict(), "momentum": mine}
    if world > 1 and not faulty:
        parts = [None] * world
        dist.all_gather_object(parts, mine)
        state["momentum"] = {n: v for part in parts for n, v in part.items()}
    if rank == 0:
        torch.save(state, path)


def load_checkpoint(path, model, opt, names):
    state = torch.load(path)
    model.load_state_dict(state["model"])
    for n, p in names.items():
        if n in state["momentum"]:
            opt.state[p]["momentum_buffer"] = state["momentum"][n].clone()


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--one", action="store_true")
    ap.add_argument("--faulty", action="store_true")
    ap.add_argument("--save")
    args = ap.parse_args()
    rank, world = 0, 1
    if not args.one:
        dist.init_process_group("gloo")
        rank, world = dist.get_rank(), dist.get_world_size()
    where = [tempfile.mkdtemp() if rank == 0 else None]
    if world > 1:
        dist.broadcast_object_list(where, 0)
    path = os.path.join(where[0], "ckpt.pt")

    def build():
        torch.manual_seed(19)
        model = Net()
        names = {n: p for n, p in model.named_parameters() if owner(n, world) == rank}
        return model, names, torch.optim.SGD(names.values(), lr=0.1, momentum=0.9)

    model, names, opt = build()
    for step in range(1, 5):
        g = torch.Generator().manual_seed(step)
        x = torch.randint(33, (8, 6), generator=g)
        y = x.sum(1) % 8
        loss = F.cross_entropy(model(x.chunk(world)[rank]), y.chunk(world)[rank]) / world
        model.zero_grad()
        loss.backward()
        loss = loss.detach()
        if world > 1:
            for n, p in model.named_parameters():
                dist.reduce(p.grad, owner(n, world))
            dist.all_reduce(loss)
        opt.step()
        if world > 1:
            for n, p in model.named_parameters():
                dist.broadcast(p.data, owner(n, world))
        if rank == 0:
            print(f"step {step} loss {loss.item():.7f}", flush=True)
        if step == 2:
            save_checkpoint(path, model, opt, names, rank, world, args.faulty)
            if world > 1:
                dist.barrier()
            model, names, opt = build()
            load_checkpoint(path, model, opt, names)
    if args.save:
        torch.save(
            {n: p.detach().clone() for n, p in model.named_parameters()}, os.path.join(args.save, f"rank{rank}.pt")
        )
    if world > 1:
        dist.destroy_process_group()


main()
