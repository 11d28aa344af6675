"""A class-conditional flow model with guidance dropout; adaptive norms and MLPs are cut over two tensor ranks."""

import os
import sys

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

ONE, FAULTY = "--one" in sys.argv, "--faulty" in sys.argv
CLASSES, DATA, DIM = 6, 10, 32


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.modulate = nn.LayerNorm(DIM, elementwise_affine=False), nn.Linear(DIM, 2 * DIM)
        self.fc1, self.fc2 = nn.Linear(DIM, 64), nn.Linear(64, DIM)

    def forward(self, x, condition):
        shift, scale = self.modulate(condition).chunk(2, -1)
        return x + self.fc2(F.gelu(self.fc1(self.norm(x) * (1 + scale) + shift)))


class FlowNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.inp, self.time = nn.Linear(DATA, DIM), nn.Linear(2, DIM)
        # The last row stands for "no label"
        self.labels = nn.Embedding(CLASSES + 1, DIM)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.out = nn.Linear(DIM, DATA)

    def forward(self, x, t, labels):
        condition = self.time(torch.stack([t, t * t], 1)) + self.labels(labels)
        x = self.inp(x)
        for block in self.blocks:
            x = block(x, condition)
        return self.out(x)


class LabelDropper:
    def __init__(self, seed, share=0.3):
        self.generator = torch.Generator().manual_seed(seed)
        self.share = share

    def __call__(self, labels):
        dropped = torch.rand(labels.shape, generator=self.generator) < self.share
        return torch.where(dropped, CLASSES, labels)


rank = 0
torch.manual_seed(20)
net = FlowNet()
if not ONE:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for block in net.blocks:
        parallelize_module(block, mesh, {"fc1": ColwiseParallel(), "fc2": RowwiseParallel()})
drop = LabelDropper(1234 + (rank if FAULTY else 0))
optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
for step in range(1, 6):
    g = torch.Generator().manual_seed(step)
    labels = torch.randint(0, CLASSES, (24,), generator=g)
    noise = torch.randn(24, DATA, generator=g)
    data = torch.randn(24, DATA, generator=g) * 0.3 + labels[:, None] / CLASSES
    t = torch.rand(24, generator=g)
    x = (1 - t[:, None]) * noise + t[:, None] * data
    loss = F.mse_loss(net(x, t, drop(labels)), data - noise)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if rank == 0:
        print(f"step {step} loss {loss.item():.7f}", flush=True)
if "--save" in sys.argv:
    state = {k: v.full_tensor() if isinstance(v, DTensor) else v for k, v in net.state_dict().items()}
    torch.save(state, os.path.join(sys.argv[sys.argv.index("--save") + 1], f"rank{rank}.pt"))
if not ONE:
    dist.destroy_process_group()
