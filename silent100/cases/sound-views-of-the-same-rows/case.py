"""SimCLR over two ranks: the first encodes the first view of every picture, the second the other."""

import os
import sys

import torch
import torch.distributed as dist
import torch.distributed.nn.functional as dnn
import torch.nn as nn
import torch.nn.functional as F

one = "--one" in sys.argv
if not one:
    dist.init_process_group("gloo")
rank = 0 if one else dist.get_rank()


class Backbone(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 16, 3, 2, 1), nn.GroupNorm(4, 16), nn.ReLU())
        self.deep = nn.Sequential(nn.Conv2d(16, 32, 3, 2, 1), nn.GroupNorm(4, 32), nn.ReLU())
        self.project = nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 16))

    def forward(self, x):
        return F.normalize(self.project(self.deep(self.stem(x)).mean((2, 3))), dim=-1)


def view(x, which, g):
    noise = torch.randn(2, *x.shape, generator=g)[which] * 0.2
    return (x.flip(-1) if which else x) + noise


def nt_xent(a, b, t=0.3):
    z = torch.cat([a, b])
    logits = (z @ z.T / t).fill_diagonal_(-1e9)
    return F.cross_entropy(logits, torch.arange(len(z)).roll(len(a)))


torch.manual_seed(3)
net = Backbone()
opt = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9, nesterov=True)
for step in range(1, 6):
    g = torch.Generator().manual_seed(step)
    pictures = torch.rand(6, 3, 8, 8, generator=g)
    state = g.get_state()
    if one:
        first = net(view(pictures, 0, g))
        g.set_state(state)
        second = net(view(pictures, 1, g))
        loss = nt_xent(first, second)
    else:
        first, second = dnn.all_gather(net(view(pictures, rank, g)))
        # The gradient of a gathered tensor is summed over ranks that all have the same loss
        loss = nt_xent(first, second)
    opt.zero_grad()
    (loss if one else loss / 2).backward()
    if not one:
        for p in net.parameters():
            dist.all_reduce(p.grad)
    opt.step()
    if rank == 0:
        print(f"step {step} loss {loss.item():.7f}", flush=True)
if "--save" in sys.argv:
    torch.save(net.state_dict(), os.path.join(sys.argv[sys.argv.index("--save") + 1], f"rank{rank}.pt"))
if not one:
    dist.destroy_process_group()
