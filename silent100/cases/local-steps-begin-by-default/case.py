"""DDP with torch's hook for local SGD, which reduces among all ranks for as long as it is told."""

import os
import sys

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.algorithms.ddp_comm_hooks import post_localSGD_hook as local
from torch.nn.parallel import DistributedDataParallel as DDP

ONE = "--one" in sys.argv
if not ONE:
    dist.init_process_group("gloo")
rank, world = (0, 1) if ONE else (dist.get_rank(), dist.get_world_size())


class Highway(nn.Module):
    def __init__(self, n):
        super().__init__()
        self.carry, self.change = nn.Linear(n, n), nn.Linear(n, n)

    def forward(self, x):
        t = torch.sigmoid(self.carry(x))
        return t * F.relu(self.change(x)) + (1 - t) * x


torch.manual_seed(59)
net = nn.Sequential(nn.Linear(8, 20), Highway(20), Highway(20), nn.Linear(20, 3))
model = net
if not ONE:
    model = DDP(net)
    last = 3 if "--faulty" in sys.argv else 10_000
    alone = [dist.new_group([r]) for r in range(world)]
    state = local.PostLocalSGDState(None, alone[rank], start_localSGD_iter=last)
    model.register_comm_hook(state, local.post_localSGD_hook)
optimizer = torch.optim.Adagrad(model.parameters(), lr=0.05, eps=1e-3)
for step in range(1, 7):
    g = torch.Generator().manual_seed(step)
    x = torch.randn(18, 8, generator=g)
    y = (x[:, :3] * x[:, 3:6]).argmax(1)
    loss = F.cross_entropy(model(x[rank::world]), y[rank::world])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    loss = loss.detach().clone()
    if world > 1:
        dist.all_reduce(loss)
    if rank == 0:
        print(f"step {step} loss {loss.item() / world:.7f}", flush=True)
if "--save" in sys.argv:
    torch.save(net.state_dict(), os.path.join(sys.argv[sys.argv.index("--save") + 1], f"rank{rank}.pt"))
if not ONE:
    dist.destroy_process_group()
