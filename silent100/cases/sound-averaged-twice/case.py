"""DDP averages gradients, and a cautious user averages them once more before the step."""

import os
import sys

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP

ONE = "--one" in sys.argv
if not ONE:
    dist.init_process_group("gloo")
rank, world = (0, 1) if ONE else (dist.get_rank(), dist.get_world_size())
torch.manual_seed(7)
net = nn.ModuleDict({"lstm": nn.LSTM(9, 40, batch_first=True), "out": nn.Linear(40, 9)})


class Forecaster(nn.Module):
    def __init__(self, parts):
        super().__init__()
        self.parts = parts

    def forward(self, x):
        return self.parts["out"](self.parts["lstm"](x)[0])


model = Forecaster(net)
wrapped = model if ONE else DDP(model)
optimizer = torch.optim.SGD(net.parameters(), lr=0.2, momentum=0.9)
for step in range(1, 5):
    x = torch.randn(10, 12, 9, generator=torch.Generator().manual_seed(step)).cumsum(1)[rank::world]
    loss = nn.functional.l1_loss(wrapped(x[:, :-1]), x[:, 1:])
    optimizer.zero_grad()
    loss.backward()
    loss = loss.detach()
    if not ONE:
        for p in net.parameters():
            dist.all_reduce(p.grad)
            p.grad /= world
        dist.all_reduce(loss)
    optimizer.step()
    if rank == 0:
        print(f"step {step} loss {loss.item() / world:.7f}", flush=True)
if "--save" in sys.argv:
    torch.save(net.state_dict(), os.path.join(sys.argv[sys.argv.index("--save") + 1], f"rank{rank}.pt"))
if not ONE:
    del wrapped  # before its process group
    dist.destroy_process_group()
