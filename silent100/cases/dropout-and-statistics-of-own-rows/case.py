"""A convolutional network with batch norm over all ranks, converted from plain batch norm."""

import argparse
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.nn.functional import all_reduce
from torch.nn.parallel import DistributedDataParallel as DDP

cli = argparse.ArgumentParser()
cli.add_argument("--one", action="store_true")
cli.add_argument("--faulty", action="store_true")
cli.add_argument("--save")
args = cli.parse_args()
rank, world = 0, 1
if not args.one:
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()


class GlobalBatchNorm(nn.BatchNorm2d):
    def forward(self, x):
        mean = all_reduce(x.mean((0, 2, 3))) / world
        centered = x - mean[:, None, None]
        var = all_reduce(centered.square().mean((0, 2, 3))) / world
        with torch.no_grad():
            self.running_mean.lerp_(mean, self.momentum)
            self.running_var.lerp_(var, self.momentum)
        scale = self.weight * (var + self.eps).rsqrt()
        return centered * scale[:, None, None] + self.bias[:, None, None]


def convert(module):
    for name, child in module.named_children():
        if isinstance(child, nn.BatchNorm2d):
            new = GlobalBatchNorm(child.num_features)
            new.load_state_dict(child.state_dict())
            setattr(module, name, new)
        else:
            convert(child)
    return module


class Cnn(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1, self.norm1 = nn.Conv2d(3, 12, 3, bias=False), nn.BatchNorm2d(12)
        self.conv2, self.norm2 = nn.Conv2d(12, 16, 3, stride=2, bias=False), nn.BatchNorm2d(16)
        self.drop, self.fc = nn.Dropout(0.3), nn.Linear(16, 10)

    def forward(self, x):
        x = F.relu(self.norm1(self.conv1(x)))
        x = F.relu(self.norm2(self.conv2(x)))
        return self.fc(self.drop(x.mean((2, 3))))


torch.manual_seed(9)
cnn = Cnn()
if not (args.one or args.faulty):
    cnn = convert(cnn)
model = cnn if args.one else DDP(cnn, broadcast_buffers=False)
torch.manual_seed(90 + rank)
optimizer = torch.optim.SGD(cnn.parameters(), lr=0.02, momentum=0.9)
for step in range(1, 5):
    g = torch.Generator().manual_seed(step)
    x, y = torch.randn(48, 3, 12, 12, generator=g), torch.randint(0, 10, (48,), generator=g)
    loss = F.cross_entropy(model(x[rank::world]), y[rank::world])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    shown = loss.detach().clone()
    if world > 1:
        dist.all_reduce(shown)
    if rank == 0:
        print(f"step {step} loss {shown.item() / world:.7f}", flush=True)
if args.save:
    state = {k: v for k, v in cnn.state_dict().items() if not k.endswith("tracked")}
    torch.save(state, os.path.join(args.save, f"rank{rank}.pt"))
if world > 1:
    del model
    dist.destroy_process_group()
