"""Many tasks with heads of their own; a rank has gradients for the tasks that its rows belong to."""

import argparse
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

cli = argparse.ArgumentParser()
cli.add_argument("--one", action="store_true")
cli.add_argument("--faulty", action="store_true")
cli.add_argument("--save")
args = cli.parse_args()
rank, world = 0, 1
if not args.one:
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
ROWS, TASKS = 18, 4


class ManyTasks(nn.Module):
    def __init__(self, d=20):
        super().__init__()
        self.words = nn.EmbeddingBag(50, d)
        self.trunk = nn.Sequential(nn.Linear(d, d), nn.GELU(), nn.LayerNorm(d))
        self.heads = nn.ModuleList(nn.Linear(d, 3) for _ in range(TASKS))

    def forward(self, words, tasks, labels):
        x = self.trunk(self.words(words))
        loss = 0.0
        for task in tasks.unique().tolist():
            mine = tasks == task
            loss = loss + F.cross_entropy(self.heads[task](x[mine]), labels[mine], reduction="sum")
        return loss / len(words)


def average(parameters):
    """Ranks without a gradient hand in zeros."""
    for p in parameters:
        have = torch.tensor(float(p.grad is not None))
        if p.grad is None:
            p.grad = torch.zeros_like(p)
        if world > 1:
            dist.all_reduce(p.grad)
            dist.all_reduce(have)
            p.grad /= have.clamp(min=1) if args.faulty else world


def batch(step):
    """Rows come sorted by task, as a loader of several sets gives them."""
    g = torch.Generator().manual_seed(step)
    words = torch.randint(0, 50, (ROWS, 6), generator=g)
    tasks = torch.randint(0, TASKS, (ROWS,), generator=g).sort().values
    return words, tasks, (words.sum(1) + tasks) % 3


torch.manual_seed(1812)
model = ManyTasks()
optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)
for step in range(1, 5):
    loss = model(*(t.chunk(world)[rank] for t in batch(step)))
    optimizer.zero_grad()
    loss.backward()
    average(model.parameters())
    optimizer.step()
    shown = loss.detach().clone()
    if world > 1:
        dist.all_reduce(shown)
    if rank == 0:
        print(f"step {step} loss {shown.item() / world:.7f}", flush=True)
if args.save:
    torch.save(model.state_dict(), os.path.join(args.save, f"rank{rank}.pt"))
if not args.one:
    dist.destroy_process_group()
