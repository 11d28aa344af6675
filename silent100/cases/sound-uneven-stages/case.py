"""An uneven pipeline with more microbatches on ranks than in one process."""

import argparse
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

cli = argparse.ArgumentParser()
cli.add_argument("--one", action="store_true")
cli.add_argument("--save")
args = cli.parse_args()


class Cell(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.rnn = nn.LayerNorm(32), nn.GRU(32, 32, batch_first=True)

    def forward(self, x):
        return x + self.rnn(self.norm(x))[0]


class Part(nn.Module):
    def __init__(self, numbers):
        super().__init__()
        torch.manual_seed(35)
        every = [nn.Embedding(42, 32), *[Cell() for _ in range(3)], nn.Linear(32, 42)]
        self.layers = nn.ModuleDict({str(i): every[i] for i in numbers})

    def forward(self, x):
        for layer in self.layers.values():
            x = layer(x)
        return x


def loss_fn(logits, labels):
    return F.cross_entropy(logits.transpose(1, 2), labels)


rank = 0
if args.one:
    part = Part(range(5))
else:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    part = Part(range(1) if rank == 0 else range(1, 5))
    schedule = Schedule1F1B(PipelineStage(part, rank, 2, torch.device("cpu")), 8, loss_fn=loss_fn)
optimizer = torch.optim.SGD(part.parameters(), lr=0.3)
for step in range(1, 4):
    rows = torch.randint(0, 42, (8, 10), generator=torch.Generator().manual_seed(step))
    losses = []
    optimizer.zero_grad()
    if args.one:
        losses = [loss_fn(part(rows[:, :-1]), rows[:, 1:])]
        losses[0].backward()
    elif rank == 0:
        schedule.step(rows[:, :-1])
    else:
        schedule.step(target=rows[:, 1:], losses=losses)
    optimizer.step()
    if losses:
        print(f"step {step} loss {torch.stack(losses).mean().item():.7f}", flush=True)
if args.save:
    torch.save(part.state_dict(), os.path.join(args.save, f"rank{rank}.pt"))
if not args.one:
    dist.destroy_process_group()
