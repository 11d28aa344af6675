import argparse
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

ap = argparse.ArgumentParser()
ap.add_argument("--one", action="store_true")
ap.add_argument("--save")
args = ap.parse_args()
torch.set_num_threads(1)
rank, world = 0, 1
if not args.one:
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()


def say(step, loss):
    if rank == 0:
        value = loss.item() if torch.is_tensor(loss) else loss
        print(f"step {step} loss {value:.7f}", flush=True)


def total(t):
    t = t.detach().clone()
    if world > 1:
        dist.all_reduce(t)
    return t


def finish(state):
    if args.save:
        os.makedirs(args.save, exist_ok=True)
        torch.save({k: v.detach().clone() for k, v in state.items()}, f"{args.save}/rank{rank}.pt")
    if not args.one:
        dist.barrier()
        dist.destroy_process_group()


torch.manual_seed(216)
model = nn.ModuleDict({"a": nn.Linear(10, 20), "b": nn.Linear(20, 20), "c": nn.Linear(20, 12), "d": nn.Linear(12, 3)})


def forward(x):
    for k in "abc":
        x = F.gelu(model[k](x))
    return model["d"](x)


def orthogonal(m, rounds=5):
    x = m / (m.norm() + 1e-6)
    wide = x.shape[0] <= x.shape[1]
    x = x if wide else x.T
    for _ in range(rounds):
        s = x @ x.T
        x = 1.5 * x - 0.5 * s @ x
    return x if wide else x.T


mats = [p for p in model.parameters() if p.ndim == 2]
vecs = torch.optim.AdamW([p for p in model.parameters() if p.ndim == 1], lr=3e-3, eps=1e-3)
owner = {p: i % world for i, p in enumerate(sorted(mats, key=lambda p: -p.numel()))}
velocity = {p: torch.zeros_like(p) for p in mats if owner[p] == rank}  # only the owner has it
gen = torch.Generator().manual_seed(16)
for step in range(1, 5):
    x = torch.randn(12, 10, generator=gen)
    y = torch.stack([x[:, 0] * x[:, 1], x[:, 2].abs(), x[:, 3].sin()], 1)
    loss = F.mse_loss(forward(x.chunk(world)[rank]), y.chunk(world)[rank])
    model.zero_grad()
    loss.backward()
    for p in mats:
        g = p.grad / world
        if world > 1:
            dist.reduce(g, owner[p])
        if owner[p] == rank:
            velocity[p].mul_(0.9).add_(g)
            p.data.add_(orthogonal(g + 0.9 * velocity[p]), alpha=-0.02)
    for p in mats:
        if world > 1:
            dist.broadcast(p.data, owner[p])
    for p in model.parameters():
        if p.ndim == 1:
            p.grad = total(p.grad) / world
    vecs.step()
    say(step, total(loss) / world)
finish(dict(model.named_parameters()))
