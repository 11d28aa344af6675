"""A looped model: every stage applies one shared core twice; interleaved stages over two ranks."""

import argparse
import os

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.pipelining import PipelineStage, ScheduleInterleavedZeroBubble

cli = argparse.ArgumentParser()
cli.add_argument("--one", action="store_true")
cli.add_argument("--save")
args = cli.parse_args()
STAGES, CHUNKS, WIDTH = 4, 4, 24


class Looped(nn.Module):
    """One stage."""

    def __init__(self):
        super().__init__()
        self.shared_core = nn.Linear(WIDTH, WIDTH)
        self.mix = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        for _ in range(2):
            x = torch.tanh(self.shared_core(x))
        return x + self.mix(x)


def stages():
    torch.manual_seed(72)
    return [Looped() for _ in range(STAGES)]


def loss_fn(out, target):
    return nn.functional.mse_loss(out, target)


rank = 0
every = stages()
if args.one:
    own = dict(enumerate(every))
else:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    own = {i: every[i] for i in range(STAGES) if i % 2 == rank}
    built = [PipelineStage(module, i, STAGES, torch.device("cpu")) for i, module in own.items()]
    schedule = ScheduleInterleavedZeroBubble(built, CHUNKS, loss_fn=loss_fn)
parts = nn.ModuleDict({str(i): module for i, module in own.items()})
optimizer = torch.optim.SGD(parts.parameters(), lr=0.3)
for step in range(1, 4):
    x = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(step))
    target, losses = x.roll(1, 1), []
    optimizer.zero_grad()
    if args.one:
        out = x
        for module in every:
            out = module(out)
        losses = [loss_fn(out, target)]
        losses[0].backward()
    elif rank == 0:
        schedule.step(x)
    else:
        schedule.step(target=target, losses=losses)
    optimizer.step()
    if losses:
        print(f"step {step} loss {torch.stack(losses).mean().item():.7f}", flush=True)
if args.save:
    torch.save(parts.state_dict(), os.path.join(args.save, f"rank{rank}.pt"))
if not args.one:
    dist.destroy_process_group()
