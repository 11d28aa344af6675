"""A loop that keeps the last state and can repeat a step."""

import copy
import os
import sys

import torch
import torch.distributed as dist
from torch import nn

ONE = "--one" in sys.argv
rank, world = 0, 1
if not ONE:
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(157)
model = nn.Sequential(nn.Linear(7, 24), nn.BatchNorm1d(24), nn.ReLU(), nn.Dropout(0.2), nn.Linear(24, 3))
model[1].eval()  # statistics are those of another run
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, eps=1e-4)
schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.8)
chance = torch.Generator().manual_seed(1)
average = copy.deepcopy(model.state_dict())


def update(step):
    x = torch.randn(12, 7, generator=torch.Generator().manual_seed(step))
    y = x[:, :3].argmax(1)
    keep = (torch.rand(12, 24, generator=chance) > 0.2).float() / 0.8
    h = model[2](model[1](model[0](x[rank::world]))) * keep[rank::world]
    loss = nn.functional.cross_entropy(model[4](h), y[rank::world])
    optimizer.zero_grad()
    loss.backward()
    shown = loss.detach()
    if world > 1:
        for p in model.parameters():
            dist.all_reduce(p.grad)
            p.grad /= world
        dist.all_reduce(shown)
    optimizer.step()
    schedule.step()
    for k, v in model.state_dict().items():
        if v.is_floating_point():
            average[k].lerp_(v, 0.1)
    return shown.item() / world


def snapshot():
    states = [copy.deepcopy(o.state_dict()) for o in (model, optimizer, schedule)]
    return *states, chance.get_state(), copy.deepcopy(average)


def restore(saved):
    for o, state in zip((model, optimizer, schedule), saved):
        o.load_state_dict(state)
    chance.set_state(saved[3])
    average.update(copy.deepcopy(saved[4]))


for step in range(1, 5):
    before = snapshot()
    loss = update(step)
    if step == 2 and not ONE:
        restore(before)
        loss = update(step)
    if rank == 0:
        print(f"step {step} loss {loss:.7f}", flush=True)
if "--save" in sys.argv:
    state = {**model.state_dict(), **{f"average.{k}": v for k, v in average.items()}}
    torch.save(state, os.path.join(sys.argv[sys.argv.index("--save") + 1], f"rank{rank}.pt"))
if not ONE:
    dist.destroy_process_group()
