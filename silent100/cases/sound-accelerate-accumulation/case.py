"""accelerate with gradient accumulation written by hand around no_sync."""

import argparse
import contextlib
import os

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from torch import nn

cli = argparse.ArgumentParser()
cli.add_argument("--one", action="store_true")
cli.add_argument("--save")
args = cli.parse_args()


def main():
    accelerator = Accelerator(cpu=True)
    rank, world = accelerator.process_index, accelerator.num_processes
    torch.manual_seed(61)
    net = nn.Sequential(nn.Embedding(64, 32), nn.Linear(32, 64), nn.SiLU(), nn.Linear(64, 64))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.4)
    model, optimizer = accelerator.prepare(net, optimizer)
    for step in range(1, 4):
        rows = torch.randint(0, 64, (16, 9), generator=torch.Generator().manual_seed(step))
        labels = rows[:, 1:].masked_fill(torch.rand(16, 8, generator=torch.Generator().manual_seed(step)) < 0.4, -100)
        count = (labels != -100).sum()
        pieces = list(zip(rows[rank::world, :-1].chunk(2), labels[rank::world].chunk(2)))
        total = torch.zeros(())
        for i, (ids, wanted) in enumerate(pieces):
            with contextlib.nullcontext() if i == len(pieces) - 1 else accelerator.no_sync(model):
                loss = F.cross_entropy(model(ids).flatten(0, 1), wanted.flatten(), reduction="sum") / count
                accelerator.backward(loss * world)
            total += loss.detach()
        optimizer.step()
        optimizer.zero_grad()
        total = accelerator.reduce(total, "sum")
        if accelerator.is_main_process:
            print(f"step {step} loss {total.item():.7f}", flush=True)
    if args.save:
        torch.save(net.state_dict(), os.path.join(args.save, f"rank{rank}.pt"))
    accelerator.free_memory()
    del model
    accelerator.end_training()


main()
