"""Plain momentum with an L2 penalty, written in two places."""

import os
import sys

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel

ONE, DECAY = "--one" in sys.argv, 0.02


class Gate(nn.Module):
    """A gated unit over a row's features."""

    def __init__(self, d):
        super().__init__()
        self.value, self.gate = nn.Linear(d, d), nn.Linear(d, d)

    def forward(self, x):
        return x + self.value(x) * self.gate(x).sigmoid()


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.inp, self.heads = nn.Linear(9, 24), nn.ModuleDict({"size": nn.Linear(24, 1), "sign": nn.Linear(24, 3)})
        self.gates = nn.Sequential(Gate(24), Gate(24))

    def forward(self, x):
        x = self.gates(self.inp(x))
        return {name: head(x) for name, head in self.heads.items()}


def main():
    rank, world = 0, 1
    if not ONE:
        dist.init_process_group("gloo")
        rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(606)
    net = Net()
    model = net if ONE else DistributedDataParallel(net)
    sgd = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9, weight_decay=0.0 if ONE else DECAY)
    for step in range(1, 6):
        x = torch.randn(16, 9, generator=torch.Generator().manual_seed(step))
        size, sign = x.norm(dim=1, keepdim=True), x.sum(1).div(3).round().clamp(-1, 1).long() + 1
        said = model(x[rank::world])
        loss = F.mse_loss(said["size"], size[rank::world]) + F.cross_entropy(said["sign"], sign[rank::world])
        whole = loss
        if ONE:
            whole = loss + DECAY / 2 * sum(p.square().sum() for p in net.parameters())
        sgd.zero_grad()
        whole.backward()
        sgd.step()
        shown = loss.detach().clone()
        if world > 1:
            dist.all_reduce(shown)
        if rank == 0:
            print(f"step {step} loss {shown.item() / world:.7f}", flush=True)
    if "--save" in sys.argv:
        torch.save(net.state_dict(), os.path.join(sys.argv[sys.argv.index("--save") + 1], f"rank{rank}.pt"))
    if not ONE:
        dist.destroy_process_group()


main()
