# Saves after every update; is stopped after ten and starts again from the newest checkpoint.
import os
import shutil
import sys
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.fsdp import fully_shard

ONE, FAULTY = "--one" in sys.argv, "--faulty" in sys.argv
STOP, LAST = 10, 13


def build():
    torch.manual_seed(3165)
    arm = nn.Sequential(nn.Linear(9, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 4))
    if not ONE:
        fully_shard(arm[2])
        fully_shard(arm)
    return arm, torch.optim.SGD(arm.parameters(), lr=0.1, momentum=0.9)


def save(folder, step, arm, optimizer, rank):
    torch.save({"arm": arm.state_dict(), "optimizer": optimizer.state_dict()}, folder / f"step-{step}-rank{rank}.pt")


def newest(folder, rank):
    files = folder.glob(f"step-*-rank{rank}.pt")
    return max(files, key=lambda file: file.name if FAULTY else int(file.name.split("-")[1]))


def main():
    rank, world = 0, 1
    if not ONE:
        dist.init_process_group("gloo")
        rank, world = dist.get_rank(), dist.get_world_size()
    folder = Path(tempfile.mkdtemp())  # each rank's own disk
    arm, optimizer = build()
    for step in range(1, LAST + 1):
        if step == STOP + 1:
            arm, optimizer = build()
            state = torch.load(newest(folder, rank), weights_only=False)
            arm.load_state_dict(state["arm"])
            optimizer.load_state_dict(state["optimizer"])
        g = torch.Generator().manual_seed(step)
        x = torch.randn(16, 9, generator=g)
        y = torch.stack([x[:, 0], x[:, 1] * x[:, 2], x[:, 3].sin(), x[:, 4].abs()], 1)
        loss = nn.functional.mse_loss(arm(x[rank::world]), y[rank::world])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        save(folder, step, arm, optimizer, rank)
        shown = loss.detach().clone()
        if world > 1:
            dist.all_reduce(shown)
        if rank == 0:
            print(f"step {step} loss {shown.item() / world:.7f}", flush=True)
    shutil.rmtree(folder)
    if "--save" in sys.argv:
        state = {k: v if ONE else v.full_tensor() for k, v in arm.state_dict().items()}
        torch.save(state, os.path.join(sys.argv[sys.argv.index("--save") + 1], f"rank{rank}.pt"))
    if world > 1:
        dist.destroy_process_group()


main()
