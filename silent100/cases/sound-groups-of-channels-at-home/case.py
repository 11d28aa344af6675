# A conv net cut along channels: the first convolution by what goes out, the second by what comes in.
import os
import sys

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

ONE = "--one" in sys.argv
if not ONE:
    dist.init_process_group("gloo")
RANK, SIZE = (0, 1) if ONE else (dist.get_rank(), dist.get_world_size())


class In(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, g):
        g = g.contiguous().clone()
        if SIZE > 1:
            dist.all_reduce(g)
        return g


class Out(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        x = x.contiguous().clone()
        if SIZE > 1:
            dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx, g):
        return g


class Residual(nn.Module):
    def __init__(self, c, hidden, groups=4):
        super().__init__()
        wide, narrow = torch.randn(hidden, c, 3, 3) * 0.1, torch.randn(c, hidden, 3, 3) * 0.1
        self.wide = nn.Parameter(wide.chunk(SIZE)[RANK].clone())
        self.norm = nn.GroupNorm(groups // SIZE, hidden // SIZE)
        self.narrow = nn.Parameter(narrow.chunk(SIZE, 1)[RANK].clone())
        self.bias = nn.Parameter(torch.zeros(c))

    def forward(self, x):
        h = F.silu(self.norm(F.conv2d(In.apply(x), self.wide, padding=1)))
        return x + Out.apply(F.conv2d(h, self.narrow, padding=1)) + self.bias[:, None, None]


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem, self.head = nn.Conv2d(3, 8, 3, 2), nn.Linear(8, 5)
        self.a, self.b = Residual(8, 24), Residual(8, 24)

    def forward(self, x):
        return self.head(self.b(self.a(self.stem(x))).amax((2, 3)))


torch.manual_seed(44)
net = Net()
sgd = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
for step in range(1, 5):
    g = torch.Generator().manual_seed(step)
    x, y = torch.randn(8, 3, 11, 11, generator=g), torch.randint(0, 5, (8,), generator=g)
    loss = F.cross_entropy(net(x), y)
    sgd.zero_grad()
    loss.backward()
    sgd.step()
    if RANK == 0:
        print(f"step {step} loss {loss.item():.7f}", flush=True)
if "--save" in sys.argv:
    cut, state = {"wide": 0, "narrow": 1, "weight": 0, "bias": 0}, {}
    for name, p in net.named_parameters():
        last = name.split(".")[-1]
        whole = name.startswith(("stem", "head")) or name in ("a.bias", "b.bias")
        state[name] = p.data if whole else (p.data, cut[last], RANK, SIZE)
    torch.save(state, os.path.join(sys.argv[sys.argv.index("--save") + 1], f"rank{RANK}.pt"))
if not ONE:
    dist.destroy_process_group()
