"""Distillation: a tensor-parallel teacher without gradients, a student under DDP."""

import argparse
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel


class Teacher(nn.Module):
    def __init__(self, rank, world):
        super().__init__()
        self.several = world > 1
        g = torch.Generator().manual_seed(1)
        up, down = torch.randn(96, 14, generator=g) / 2, torch.randn(8, 96, generator=g) / 4
        self.register_buffer("up", up.chunk(world)[rank].clone())
        self.register_buffer("down", down.chunk(world, 1)[rank].clone())

    @torch.no_grad()
    def forward(self, x):
        y = torch.relu(x @ self.up.T) @ self.down.T
        if self.several:
            dist.all_reduce(y)
        return y


def main():
    cli = argparse.ArgumentParser()
    cli.add_argument("--one", action="store_true")
    cli.add_argument("--save", type=Path)
    args = cli.parse_args()
    rank, world = 0, 1
    if not args.one:
        dist.init_process_group("gloo")
        rank, world = dist.get_rank(), dist.get_world_size()
    teacher = Teacher(rank, world)
    torch.manual_seed(10)
    student = nn.Sequential(nn.Linear(14, 18), nn.GELU(), nn.Linear(18, 8))
    model = student if args.one else DistributedDataParallel(student, gradient_as_bucket_view=True)
    optimizer = torch.optim.RAdam(student.parameters(), lr=0.02, eps=1e-5)
    for step in range(1, 8):
        x = torch.randn(22, 14, generator=torch.Generator().manual_seed(step))
        wanted = F.softmax(teacher(x) / 2, -1)[rank::world]
        loss = F.kl_div(F.log_softmax(model(x[rank::world]) / 2, -1), wanted, reduction="batchmean") * 4
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        loss = loss.detach() / world
        if world > 1:
            dist.all_reduce(loss)
        if rank == 0:
            print(f"step {step} loss {loss.item():.7f}", flush=True)
    if args.save:
        torch.save(student.state_dict(), args.save / f"rank{rank}.pt")
    if world > 1:
        del model
        dist.destroy_process_group()


main()
