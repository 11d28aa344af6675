"""An endless sampler over eleven rows for two data ranks; each epoch has its own permutation."""

import os
import sys

import torch
import torch.distributed as dist
import torch.nn as nn

ONE = "--one" in sys.argv
STRIDE_FIRST = "--faulty" in sys.argv
ROWS, GLOBAL = 11, 4


def permutation(epoch):
    return torch.randperm(ROWS, generator=torch.Generator().manual_seed(epoch)).tolist()


def endless(rank, world):
    """Yields this rank's rows of each global batch; rows that do not fill a global batch are dropped."""
    per_rank = GLOBAL // world
    epoch = 0
    while True:
        order = permutation(epoch)
        if STRIDE_FIRST:
            own = order[rank::world]
        else:
            own = order[: ROWS // GLOBAL * GLOBAL][rank::world]
        for start in range(0, len(own) - per_rank + 1, per_rank):
            yield own[start : start + per_rank]
        epoch += 1


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Bilinear(10, 10, 24)
        self.norm = nn.LayerNorm(24)
        self.b = nn.Linear(24, 24)
        self.c = nn.Linear(24, 2)

    def forward(self, x):
        h = self.norm(self.a(x, x))
        return self.c(h + torch.nn.functional.gelu(self.b(h)))


if ONE:
    rank, world = 0, 1
else:
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(31)
net = Net()
optim = torch.optim.SGD(net.parameters(), lr=0.2)
gen = torch.Generator().manual_seed(31)
X, Y = torch.randn(ROWS, 10, generator=gen), torch.randn(ROWS, 2, generator=gen)
batches = endless(rank, world)
for step in range(1, 6):
    rows = next(batches)
    loss = (net(X[rows]) - Y[rows]).square().mean()
    optim.zero_grad()
    loss.backward()
    loss = loss.detach()
    if not ONE:
        for p in net.parameters():
            dist.all_reduce(p.grad)
            p.grad.mul_(1 / world)
        dist.all_reduce(loss)
        loss /= world
    optim.step()
    if rank == 0:
        print(f"step {step} loss {loss.item():.7f}", flush=True)
if "--save" in sys.argv:
    torch.save(net.state_dict(), os.path.join(sys.argv[sys.argv.index("--save") + 1], f"rank{rank}.pt"))
if not ONE:
    dist.destroy_process_group()
