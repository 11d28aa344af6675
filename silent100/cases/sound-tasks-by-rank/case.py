import argparse
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

cli = argparse.ArgumentParser()
cli.add_argument("--one", action="store_true")
cli.add_argument("--save")
args = cli.parse_args()


class MultiTask(nn.Module):
    def __init__(self):
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(13, 44), nn.CELU(), nn.Linear(44, 44), nn.CELU())
        self.heads = nn.ModuleList([nn.Linear(44, 6), nn.Linear(44, 2)])

    def loss(self, task, x):
        out = self.heads[task](self.trunk(x))
        if task == 0:
            return F.cross_entropy(out, x[:, :6].argmax(1))
        return F.mse_loss(out, x[:, -2:].square())


def rows(step, task):
    return torch.randn(9 + 3 * task, 13, generator=torch.Generator().manual_seed(10 * step + task))


rank, world = 0, 1
if not args.one:
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(49)
model = MultiTask()
tasks = [0, 1] if args.one else [rank]
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-2)
for step in range(1, 6):
    optimizer.zero_grad()
    loss = sum(model.loss(task, rows(step, task)) for task in tasks)
    loss.backward()
    shown = loss.detach().clone()
    if world > 1:
        for p in model.parameters():
            if p.grad is None:
                p.grad = torch.zeros_like(p)
            dist.all_reduce(p.grad)
        dist.all_reduce(shown)
    optimizer.step()
    if rank == 0:
        print(f"step {step} loss {shown.item():.7f}", flush=True)
if args.save:
    torch.save(model.state_dict(), os.path.join(args.save, f"rank{rank}.pt"))
if world > 1:
    dist.destroy_process_group()
