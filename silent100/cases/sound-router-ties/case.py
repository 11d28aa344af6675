"""A router that starts at zero: all experts tie and the first ones are chosen."""

import os
import sys

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

ONE = "--one" in sys.argv
if not ONE:
    dist.init_process_group("gloo")
RANK, WORLD = (0, 1) if ONE else (dist.get_rank(), dist.get_world_size())


class Moe(nn.Module):
    def __init__(self, dim=28, experts=4, k=2):
        super().__init__()
        self.k = k
        self.router = nn.Linear(dim, experts, bias=False)
        nn.init.zeros_(self.router.weight)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(dim, 40), nn.ReLU(), nn.Linear(40, dim)) for _ in range(experts)
        )

    def forward(self, x):
        scores = self.router(x).softmax(-1)
        order = scores.detach().sort(dim=-1, descending=True, stable=True).indices[:, : self.k]
        weights = torch.zeros_like(scores).scatter(1, order, 1.0) * scores
        return x + sum(weights[:, i : i + 1] * e(x) for i, e in enumerate(self.experts))


torch.manual_seed(9)
net = nn.Sequential(nn.Linear(10, 28), Moe(), Moe(), nn.Linear(28, 3))
optimizer = torch.optim.SGD(net.parameters(), lr=0.2)
for step in range(1, 5):
    g = torch.Generator().manual_seed(step)
    x, y = torch.randn(24, 10, generator=g), torch.randint(0, 3, (24,), generator=g)
    loss = F.cross_entropy(net(x[RANK::WORLD]), y[RANK::WORLD])
    optimizer.zero_grad()
    loss.backward()
    loss = loss.detach()
    if WORLD > 1:
        for p in net.parameters():
            dist.all_reduce(p.grad)
            p.grad /= WORLD
        dist.all_reduce(loss)
    optimizer.step()
    if RANK == 0:
        print(f"step {step} loss {loss.item() / WORLD:.7f}", flush=True)
if "--save" in sys.argv:
    torch.save(net.state_dict(), os.path.join(sys.argv[sys.argv.index("--save") + 1], f"rank{RANK}.pt"))
if not ONE:
    dist.destroy_process_group()
