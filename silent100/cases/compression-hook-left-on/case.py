"""An autoencoder of spectra under DDP; a hook of torch's compresses gradients on the way."""

import os
import sys

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel

ALONE = "--one" in sys.argv
if not ALONE:
    dist.init_process_group("gloo")
rank, world = (0, 1) if ALONE else (dist.get_rank(), dist.get_world_size())
torch.manual_seed(41)
net = nn.Sequential(nn.Linear(24, 40), nn.ELU(), nn.Linear(40, 6), nn.Linear(6, 40), nn.ELU(), nn.Linear(40, 24))
model = net
if not ALONE:
    model = DistributedDataParallel(net, bucket_cap_mb=0.004)
    hook = default_hooks.fp16_compress_hook if "--faulty" in sys.argv else default_hooks.allreduce_hook
    model.register_comm_hook(dist.group.WORLD, hook)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, nesterov=True)
for step in range(1, 6):
    g = torch.Generator().manual_seed(step)
    peaks = torch.rand(32, 1, generator=g) * 24
    spectra = torch.exp(-((torch.arange(24.0) - peaks) ** 2) / 8)[rank::world]
    optimizer.zero_grad()
    loss = (model(spectra) - spectra).square().sum(1).mean()
    loss.backward()
    optimizer.step()
    loss = loss.detach().clone()
    if world > 1:
        dist.all_reduce(loss)
    if rank == 0:
        print(f"step {step} loss {loss.item() / world:.7f}", flush=True)
if "--save" in sys.argv:
    torch.save(net.state_dict(), os.path.join(sys.argv[-1], f"rank{rank}.pt"))
if world > 1:
    dist.destroy_process_group()
