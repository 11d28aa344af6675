"""Three heads over a trunk; the third waits for data that has not come yet."""

import os
import sys

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F


class Heads(nn.Module):
    def __init__(self):
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(14, 40), nn.SiLU(), nn.Linear(40, 40), nn.SiLU())
        self.heads = nn.ModuleDict({"price": nn.Linear(40, 1), "volume": nn.Linear(40, 1), "spread": nn.Linear(40, 1)})

    def forward(self, x, names):
        h = self.trunk(x)
        return torch.cat([self.heads[name](h) for name in names], 1)


def run(one, folder):
    rank, world = 0, 1
    if not one:
        dist.init_process_group("gloo")
        rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(77)
    net = Heads()
    sgd = torch.optim.SGD(net.parameters(), lr=0.1)
    if not one:
        for parameter in net.parameters():
            parameter.grad = torch.zeros_like(parameter)
    for step in range(1, 7):
        g = torch.Generator().manual_seed(step)
        x, y = torch.randn(12, 14, generator=g), torch.randn(12, 2, generator=g)
        # The volume head is trained in even steps only
        names = ["price"] if step % 2 else ["price", "volume"]
        loss = F.mse_loss(net(x[rank::world], names), y[rank::world, : len(names)])
        sgd.zero_grad(set_to_none=one)
        loss.backward()
        total = loss.detach().clone()
        if not one:
            for parameter in net.parameters():
                dist.all_reduce(parameter.grad)
                parameter.grad.mul_(1 / world)
            dist.all_reduce(total)
        sgd.step()
        if rank == 0:
            print(f"step {step} loss {total.item() / world:.7f}", flush=True)
    if folder:
        torch.save(net.state_dict(), os.path.join(folder, f"rank{rank}.pt"))
    if not one:
        dist.destroy_process_group()


run("--one" in sys.argv, sys.argv[sys.argv.index("--save") + 1] if "--save" in sys.argv else None)
