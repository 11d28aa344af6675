"""Gradients are compressed by PowerSGD of a rank as large as the matrices, which loses nothing."""

import os
import sys

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as power
from torch.nn.parallel import DistributedDataParallel

torch.set_default_dtype(torch.float64)
SOLO = "--one" in sys.argv
if not SOLO:
    dist.init_process_group("gloo")
rank, world = (0, 1) if SOLO else (dist.get_rank(), dist.get_world_size())
torch.manual_seed(67)
net = nn.Sequential(
    nn.Linear(5, 40), nn.Softplus(), nn.Linear(40, 6), nn.Softplus(), nn.Linear(6, 30), nn.Linear(30, 1)
)
model = net
if not SOLO:
    model = DistributedDataParallel(net)
    kinds = {"matrix_approximation_rank": 6, "start_powerSGD_iter": 2, "min_compression_rate": 0.1}
    model.register_comm_hook(power.PowerSGDState(None, orthogonalization_epsilon=1e-12, **kinds), power.powerSGD_hook)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
for step in range(1, 7):
    x = torch.randn(24, 5, generator=torch.Generator().manual_seed(step))
    y = (x[:, :1] * x[:, 1:2]).tanh() + x[:, 2:3]
    optimizer.zero_grad()
    loss = (model(x[rank::world]) - y[rank::world]).square().mean()
    loss.backward()
    optimizer.step()
    loss = loss.detach().clone()
    if world > 1:
        dist.all_reduce(loss)
    if rank == 0:
        print(f"step {step} loss {loss.item() / world:.7f}", flush=True)
if "--save" in sys.argv:
    torch.save(net.state_dict(), os.path.join(sys.argv[sys.argv.index("--save") + 1], f"rank{rank}.pt"))
if not SOLO:
    dist.destroy_process_group()
