"""A critic under spectral norm: power iterations run in forward, on each rank for itself and alike."""

import os
import sys

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.nn.utils.parametrizations import spectral_norm

alone = "--one" in sys.argv
rank, world = 0, 1
if not alone:
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(45)
critic = nn.Sequential(
    spectral_norm(nn.Conv1d(1, 6, 5, 2)),
    nn.LeakyReLU(0.2),
    spectral_norm(nn.Conv1d(6, 12, 5, 2)),
    nn.LeakyReLU(0.2),
    nn.Flatten(),
    spectral_norm(nn.Linear(60, 1)),
)
model = critic if alone else DDP(critic, broadcast_buffers=False)
optimizer = torch.optim.RMSprop(model.parameters(), lr=1e-3, eps=1e-3)
for step in range(1, 6):
    g = torch.Generator().manual_seed(step)
    real = torch.randn(10, 1, 32, generator=g).cumsum(-1)[rank::world]
    made = torch.randn(10, 1, 32, generator=g)[rank::world] * 3
    optimizer.zero_grad()
    scores = model(torch.cat([real, made]))[:, 0]
    loss = (1 - scores[: len(real)]).relu().mean() + (1 + scores[len(real) :]).relu().mean()
    loss.backward()
    optimizer.step()
    loss = loss.detach().clone()
    if world > 1:
        dist.all_reduce(loss)
    if rank == 0:
        print(f"step {step} loss {loss.item() / world:.7f}", flush=True)
if "--save" in sys.argv:
    torch.save(critic.state_dict(), os.path.join(sys.argv[-1], f"rank{rank}.pt"))
if world > 1:
    dist.destroy_process_group()
