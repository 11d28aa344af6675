"""Local SGD in two tiers: weights are averaged in a node after each step and over both nodes after every second one."""

import argparse
import copy
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

flags = argparse.ArgumentParser(description=__doc__)
flags.add_argument("--one", action="store_true")
flags.add_argument("--faulty", action="store_true")
flags.add_argument("--save")
flags = flags.parse_args()
rank, world = 0, 1
if not flags.one:
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()


WORKERS, NODE = 4, 2
if flags.one:
    mine, node = range(WORKERS), None
else:
    nodes = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    mine, node = [rank], nodes[rank // NODE]


def average(models, everybody):
    """Averages weights; in one process over lists of models, else over a group."""
    with torch.no_grad():
        if flags.one:
            teams = [models] if everybody else [models[:NODE], models[NODE:]]
            for team in teams:
                for ps in zip(*(m.parameters() for m in team)):
                    mean = sum(p.detach() for p in ps) / len(ps)
                    for p in ps:
                        p.copy_(mean)
            return
        group = dist.group.WORLD if everybody and not flags.faulty else node
        for p in models[0].parameters():
            dist.all_reduce(p, group=group)
            p /= dist.get_world_size(group)


torch.manual_seed(9)
start = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 1))
models = [copy.deepcopy(start) for _ in mine]
optimizers = [torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.5) for m in models]
for step in range(1, 7):
    x = torch.randn(32, 8, generator=torch.Generator().manual_seed(step))
    y = (x[:, :4].prod(1) + x[:, 4:].sum(1)).unsqueeze(1)
    shown = torch.zeros(())
    for worker, model, optimizer in zip(mine, models, optimizers):
        loss = F.mse_loss(model(x[worker::WORKERS]), y[worker::WORKERS])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        shown += loss.detach() / WORKERS
    average(models, everybody=step % 2 == 0)
    if not flags.one:
        dist.all_reduce(shown)
    if rank == 0:
        print(f"step {step} loss {shown.item():.7f}", flush=True)
if flags.save:
    torch.save(models[0].state_dict(), os.path.join(flags.save, f"rank{rank}.pt"))
if world > 1:
    dist.destroy_process_group()
