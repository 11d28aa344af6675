"""Three updates with rows shared out; then the state is saved and the same net goes on tensor-parallel."""

import os
import sys
import tempfile

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

ONE = "--one" in sys.argv


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.inward, self.wide, self.narrow = nn.Linear(9, 16), nn.Linear(16, 48), nn.Linear(48, 16)
        self.out = nn.Linear(16, 5)

    def forward(self, x):
        x = torch.tanh(self.inward(x))
        return self.out(x + self.narrow(F.gelu(self.wide(x))))


def adam(net):
    return torch.optim.Adam(net.parameters(), lr=0.01, eps=1e-4, foreach=False)


def cut(net, moments, mesh):
    """The net by the plan, the moments as the weights they belong to."""
    parallelize_module(net, mesh, {"wide": ColwiseParallel(), "narrow": RowwiseParallel()})
    optimizer = adam(net)
    for name, p in net.named_parameters():
        state = moments[name]
        if isinstance(p, DTensor):
            state = {k: v if k == "step" else distribute_tensor(v, mesh, p.placements) for k, v in state.items()}
        optimizer.state[p] = state
    return optimizer


def rows(step):
    x = torch.randn(24, 9, generator=torch.Generator().manual_seed(step))
    return x, (x[:, :5] - x[:, 4:]).argmax(1)


def main():
    torch.manual_seed(27)
    net = Net()
    optimizer = adam(net)
    rank, world, apart = 0, 1, False
    if not ONE:
        dist.init_process_group("gloo")
        rank, world, apart = dist.get_rank(), dist.get_world_size(), True
    for step in range(1, 7):
        if step == 4 and not ONE:
            with tempfile.TemporaryDirectory() as folder:
                moments = {name: optimizer.state[p] for name, p in net.named_parameters()}
                torch.save([net.state_dict(), moments], f"{folder}/state.pt")
                weights, moments = torch.load(f"{folder}/state.pt")
            torch.manual_seed(99 + rank)
            net = Net()
            net.load_state_dict(weights)
            optimizer = cut(net, moments, init_device_mesh("cpu", (world,)))
            apart = False
        x, y = rows(step)
        if apart:
            x, y = x[rank::world], y[rank::world]
        loss = F.cross_entropy(net(x), y)
        optimizer.zero_grad()
        loss.backward()
        loss = loss.detach()
        if apart:
            for t in [p.grad for p in net.parameters()] + [loss]:
                dist.all_reduce(t)
                t /= world
        optimizer.step()
        if rank == 0:
            print(f"step {step} loss {loss.item():.7f}", flush=True)
    state = {k: v.full_tensor() if isinstance(v, DTensor) else v for k, v in net.state_dict().items()}
    if "--save" in sys.argv:
        torch.save(state, os.path.join(sys.argv[sys.argv.index("--save") + 1], f"rank{rank}.pt"))
    if world > 1:
        dist.destroy_process_group()


main()
