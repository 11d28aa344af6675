"""fully_shard; gradients are clipped when they are large against their own history."""

import os
import sys

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

ONE = "--one" in sys.argv


class Bound:
    def __init__(self, times=1.05, keep=0.6):
        self.times, self.keep, self.mean = times, keep, None

    @torch.no_grad()
    def __call__(self, params):
        squares = torch.zeros(())
        for p in params:
            piece = p.grad.to_local() if isinstance(p.grad, DTensor) else p.grad
            squares += piece.square().sum()
        if not ONE:
            dist.all_reduce(squares)
        norm = squares.sqrt().item()
        if self.mean is not None and norm > self.times * self.mean:
            factor = self.times * self.mean / norm
            for p in params:
                p.grad.mul_(factor)
            norm *= factor
        self.mean = norm if self.mean is None else self.keep * self.mean + (1 - self.keep) * norm


def main():
    torch.manual_seed(82)
    net = nn.Sequential(*(nn.Sequential(nn.Linear(15, 15), nn.SELU()) for _ in range(3)), nn.Linear(15, 4))
    rank, world = 0, 1
    if not ONE:
        dist.init_process_group("gloo")
        rank, world = dist.get_rank(), dist.get_world_size()
        mesh = init_device_mesh("cpu", (world,))
        for part in (*net[:3], net):
            fully_shard(part, mesh=mesh)
    params, bound = list(net.parameters()), Bound()
    optimizer = torch.optim.SGD(params, lr=0.05, momentum=0.9)
    for step in range(1, 7):
        x = torch.randn(16, 15, generator=torch.Generator().manual_seed(step)) * (1 + step % 3)
        y = x.view(16, 3, 5).amax(1)[:, :4]
        loss = F.mse_loss(net(x[rank::world]), y[rank::world])
        optimizer.zero_grad()
        loss.backward()
        bound(params)
        optimizer.step()
        shown = loss.detach() / world
        if world > 1:
            dist.all_reduce(shown)
        if rank == 0:
            print(f"step {step} loss {shown.item():.7f}", flush=True)
    state = {k: v.full_tensor() if isinstance(v, DTensor) else v for k, v in net.state_dict().items()}
    if "--save" in sys.argv:
        torch.save(state, os.path.join(sys.argv[sys.argv.index("--save") + 1], f"rank{rank}.pt"))
    if world > 1:
        dist.destroy_process_group()


main()
