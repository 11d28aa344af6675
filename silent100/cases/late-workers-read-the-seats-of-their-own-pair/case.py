import argparse
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

ap = argparse.ArgumentParser()
ap.add_argument("--one", action="store_true")
ap.add_argument("--faulty", action="store_true")
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


torch.manual_seed(120)
GLOBAL, JOIN = 8, 3  # rows in a batch; the step at which two more workers join
model = nn.Sequential(nn.Linear(6, 16), nn.LeakyReLU(), nn.Linear(16, 16), nn.LeakyReLU(), nn.Linear(16, 4))
opt = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
early = None if args.one else dist.new_group([0, 1])
gen = torch.Generator().manual_seed(13)
data = torch.randn(64, 6, generator=gen)
target = (data[:, :4] * data[:, 2:]).tanh()
order = torch.randperm(64, generator=gen)


def catch_up():
    """New workers take the weights and momentum of worker 0."""
    for p in model.parameters():
        dist.broadcast(p.data, 0)
        buf = opt.state[p].setdefault("momentum_buffer", torch.zeros_like(p))
        dist.broadcast(buf, 0)


for step in range(1, 6):
    if step == JOIN and world > 1:
        catch_up()
    alive = world if step >= JOIN else min(world, 2)
    group = early if step < JOIN else None
    if rank >= alive:
        continue
    seat = rank
    if args.faulty and step >= JOIN:
        seat = rank if rank < 2 else rank - 2
    batch = order[(step - 1) * GLOBAL : step * GLOBAL]
    rows = batch.chunk(alive)[seat]
    loss = F.mse_loss(model(data[rows]), target[rows])
    opt.zero_grad()
    loss.backward()
    shown = loss.detach().clone()
    if world > 1:
        for t in [p.grad for p in model.parameters()] + [shown]:
            dist.all_reduce(t, group=group)
            t /= alive
    opt.step()
    say(step, shown)
finish(dict(model.named_parameters()))
