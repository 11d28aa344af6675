# DDP and ZeroRedundancyOptimizer, with two parameter groups.
import os
import sys

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel as DDP

ONE = "--one" in sys.argv


class Unet(nn.Module):
    """A one-dimensional U-Net."""

    def __init__(self, w=8):
        super().__init__()
        self.inp, self.out = nn.Conv1d(2, w, 3, padding=1), nn.Conv1d(2 * w, 2, 3, padding=1)
        self.down, self.mid = nn.Conv1d(w, 2 * w, 4, stride=2, padding=1), nn.Conv1d(2 * w, 2 * w, 3, padding=1)
        self.up = nn.ConvTranspose1d(2 * w, w, 4, stride=2, padding=1)

    def forward(self, x):
        a = torch.relu(self.inp(x))
        b = torch.relu(self.mid(torch.relu(self.down(a))))
        return self.out(torch.cat([a, torch.relu(self.up(b))], 1))


def train():
    rank, world = 0, 1
    if not ONE:
        dist.init_process_group("gloo")
        rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(10)
    net = Unet()
    kinds = {"lr": 2e-3, "eps": 1e-4}
    weights = [p for p in net.parameters() if p.dim() > 1]
    biases = [p for p in net.parameters() if p.dim() == 1]
    groups = [{"params": weights, "weight_decay": 0.1}, {"params": biases, "weight_decay": 0.0}]
    if ONE:
        model, optimizer = net, torch.optim.AdamW(groups, **kinds)
    else:
        model, optimizer = DDP(net), ZeroRedundancyOptimizer(groups, torch.optim.AdamW, **kinds)
    for step in range(1, 5):
        x = torch.randn(8, 2, 16, generator=torch.Generator().manual_seed(step)).cumsum(2)[rank::world]
        loss = nn.functional.mse_loss(model(x), x.roll(1, 2))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        shown = loss.detach().clone()
        if world > 1:
            dist.all_reduce(shown)
        if rank == 0:
            print(f"step {step} loss {shown.item() / world:.7f}", flush=True)
    if "--save" in sys.argv:
        torch.save(net.state_dict(), os.path.join(sys.argv[sys.argv.index("--save") + 1], f"rank{rank}.pt"))
    if world > 1:
        del model, optimizer
        dist.destroy_process_group()


train()
