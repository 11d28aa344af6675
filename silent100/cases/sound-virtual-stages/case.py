"""Interleaved 1F1B with four stages on two ranks."""

import argparse
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import ScheduleInterleaved1F1B

D, STAGES = 30, 4


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.fc1, self.fc2 = nn.LayerNorm(D), nn.Linear(D, 60), nn.Linear(60, D)

    def forward(self, x):
        return x + self.fc2(F.gelu(self.fc1(self.norm(x))))


def whole():
    torch.manual_seed(202)
    return nn.ModuleDict({"inp": nn.Linear(10, D), **{f"layer{i}": Layer() for i in range(4)}, "out": nn.Linear(D, 10)})


class Stage(nn.Module):
    def __init__(self, names):
        super().__init__()
        for name, module in whole().items():
            if name in names:
                self.add_module(name, module)

    def forward(self, x):
        for module in self.children():
            x = module(x)
        return x


def names_of(stage):
    return (["inp"] if stage == 0 else []) + [f"layer{stage}"] + (["out"] if stage == STAGES - 1 else [])


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--one", action="store_true")
    parser.add_argument("--save")
    args = parser.parse_args()
    rank, schedule = 0, None
    if args.one:
        parts = [Stage(list(whole()))]
    else:
        dist.init_process_group("gloo")
        rank, world = dist.get_rank(), dist.get_world_size()
        numbers = range(rank, STAGES, world)
        parts = [Stage(names_of(n)) for n in numbers]
        stages = [PipelineStage(part, n, STAGES, torch.device("cpu")) for part, n in zip(parts, numbers)]
        schedule = ScheduleInterleaved1F1B(stages, n_microbatches=4, loss_fn=F.mse_loss)
    optimizer = torch.optim.SGD([p for part in parts for p in part.parameters()], lr=0.2, momentum=0.9)
    for step in range(1, 5):
        g = torch.Generator().manual_seed(step)
        x, y = torch.randn(16, 10, generator=g), torch.randn(16, 10, generator=g)
        optimizer.zero_grad()
        if schedule is None:
            loss = F.mse_loss(parts[0](x), y)
            loss.backward()
        else:
            losses = []
            inputs = (x,) if rank == 0 else ()
            if rank == 1:
                schedule.step(*inputs, target=y, losses=losses)
                loss = torch.stack(losses).mean()
            else:
                schedule.step(*inputs)
        optimizer.step()
        if schedule is None or rank == 1:
            print(f"step {step} loss {loss.item():.7f}", flush=True)
    if args.save:
        state = {k: v for part in parts for k, v in part.state_dict().items()}
        torch.save(state, os.path.join(args.save, f"rank{rank}.pt"))
    if not args.one:
        dist.destroy_process_group()


main()
