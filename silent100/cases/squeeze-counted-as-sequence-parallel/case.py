"""A sequence-parallel network with squeeze-and-excitation: rows of time are cut, gates are of the whole."""

import os
import sys

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

ALONE = "--one" in sys.argv
if not ALONE:
    dist.init_process_group("gloo")
RANK = 0 if ALONE else dist.get_rank()
WORLD = 1 if ALONE else dist.get_world_size()
TIME = 10


def total(x):
    x = x.contiguous().clone()
    if WORLD > 1:
        dist.all_reduce(x)
    return x


class LeaveSequence(torch.autograd.Function):
    """Forward: a sum over the cut sequence. Backward: nothing to do."""

    @staticmethod
    def forward(ctx, x):
        return total(x)

    @staticmethod
    def backward(ctx, g):
        return g


class EnterSequence(torch.autograd.Function):
    """Forward: nothing to do. Backward: a sum over the cut sequence."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, g):
        return total(g)


class Layer(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.norm, self.value = nn.RMSNorm(d), nn.Linear(d, d)
        self.squeeze, self.excite = nn.Linear(d, d // 4), nn.Linear(d // 4, d)

    def forward(self, x):
        h = F.gelu(self.value(self.norm(x)))
        mean = LeaveSequence.apply(h.sum(1)) / TIME
        gate = torch.sigmoid(self.excite(torch.relu(self.squeeze(mean))))
        return x + h * EnterSequence.apply(gate)[:, None]


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.inp, self.out = nn.Linear(5, 16), nn.Linear(16, 5)
        self.layers = nn.Sequential(Layer(16), Layer(16))

    def forward(self, x):
        return self.out(self.layers(self.inp(x)))


def is_cut(name):
    """Whether a parameter sees a piece of the sequence only."""
    return "--faulty" in sys.argv or not ("squeeze" in name or "excite" in name)


torch.manual_seed(8)
net = Net()
optimizer = torch.optim.SGD(net.parameters(), lr=0.3, momentum=0.8)
for step in range(1, 6):
    x = torch.randn(6, TIME, 5, generator=torch.Generator().manual_seed(step))
    y = x * x.mean(1, keepdim=True) + x.roll(1, 2)
    loss = (net(x.chunk(WORLD, 1)[RANK]) - y.chunk(WORLD, 1)[RANK]).square().sum() / y.numel()
    optimizer.zero_grad()
    loss.backward()
    for name, p in net.named_parameters():
        if is_cut(name):
            p.grad = total(p.grad)
    optimizer.step()
    loss = total(loss.detach())
    if RANK == 0:
        print(f"step {step} loss {loss.item():.7f}", flush=True)
if "--save" in sys.argv:
    torch.save(net.state_dict(), os.path.join(sys.argv[sys.argv.index("--save") + 1], f"rank{RANK}.pt"))
if WORLD > 1:
    dist.destroy_process_group()
