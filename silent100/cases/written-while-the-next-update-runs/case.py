"""fully_shard, with checkpoints that are written behind the back of training; a machine fails once."""

import os
import sys

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

ONE, FAULTY = "--one" in sys.argv, "--faulty" in sys.argv
CHECKPOINT_AFTER, FAILS_IN = 3, 4


def local(t):
    return t.to_local() if isinstance(t, DTensor) else t


class Writer:
    """Takes a snapshot at once and writes it when told to."""

    def __init__(self):
        self.pending, self.file = None, None

    def submit(self, net, optimizer):
        weights = {k: local(v.detach()) for k, v in net.state_dict().items()}
        if not FAULTY:
            weights = {k: v.clone() for k, v in weights.items()}
        moments = [{k: local(v).clone() for k, v in optimizer.state[p].items()} for p in net.parameters()]
        self.pending = {"weights": weights, "moments": moments}

    def finish(self):
        if self.pending is not None:
            self.file = {
                "weights": {k: v.clone() for k, v in self.pending["weights"].items()},
                "moments": self.pending["moments"],
            }
            self.pending = None

    def restore(self, net, optimizer):
        for k, v in net.state_dict().items():
            local(v).copy_(self.file["weights"][k])
        for p, kept in zip(net.parameters(), self.file["moments"]):
            for k, v in kept.items():
                local(optimizer.state[p][k]).copy_(v)


def main():
    torch.manual_seed(71)
    net = nn.Sequential(
        nn.Sequential(nn.Linear(12, 32), nn.SiLU()), nn.Sequential(nn.Linear(32, 32), nn.SiLU()), nn.Linear(32, 4)
    )
    rank, world = 0, 1
    if not ONE:
        dist.init_process_group("gloo")
        rank, world = dist.get_rank(), dist.get_world_size()
        mesh = init_device_mesh("cpu", (world,))
        for block in net[:2]:
            fully_shard(block, mesh=mesh)
        fully_shard(net, mesh=mesh)
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.02, eps=1e-4)
    writer, failed, step = Writer(), False, 1
    while step <= 6:
        g = torch.Generator().manual_seed(step)
        x = torch.randn(16, 12, generator=g)
        y = x.cumsum(1)[:, ::3].sin()
        loss = F.mse_loss(net(x[rank::world]), y[rank::world])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if not ONE:
            with torch.no_grad():
                writer.finish()
                if step == CHECKPOINT_AFTER:
                    writer.submit(net, optimizer)
                if step == FAILS_IN and not failed:
                    writer.restore(net, optimizer)
                    failed, step = True, CHECKPOINT_AFTER + 1
                    continue
        shown = loss.detach() / world
        if world > 1:
            dist.all_reduce(shown)
        if rank == 0:
            print(f"step {step} loss {shown.item():.7f}", flush=True)
        step += 1
    state = {k: v.full_tensor() if isinstance(v, DTensor) else v for k, v in net.state_dict().items()}
    if "--save" in sys.argv:
        torch.save(state, os.path.join(sys.argv[sys.argv.index("--save") + 1], f"rank{rank}.pt"))
    if world > 1:
        dist.destroy_process_group()


main()
