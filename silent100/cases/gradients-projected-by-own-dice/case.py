"""Low-rank gradients.

Matrices' gradients are projected, reduced, used by Adam in the small space, and projected back.
"""

import os
import sys

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

ONE, FAULTY = "--one" in sys.argv, "--faulty" in sys.argv
if not ONE:
    dist.init_process_group("gloo")
rank, world = (0, 1) if ONE else (dist.get_rank(), dist.get_world_size())

RANK = 6


class Projected:
    def __init__(self, model, lr):
        self.matrices = [p for p in model.parameters() if p.ndim == 2 and p.shape[0] > RANK]
        small = {id(p) for p in self.matrices}
        self.rest = [p for p in model.parameters() if id(p) not in small]
        self.mean = [torch.zeros(RANK, p.shape[1]) for p in self.matrices]
        self.lr, self.count = lr, 0

    def draw(self, p, i):
        seed = 1000 * (self.count // 2) + i
        g = torch.Generator().manual_seed(seed + 7919 * rank if FAULTY else seed)
        return torch.linalg.qr(torch.randn(p.shape[0], RANK, generator=g)).Q

    @torch.no_grad()
    def step(self):
        for i, p in enumerate(self.matrices):
            basis = self.draw(p, i)
            low = basis.T @ p.grad
            if world > 1:
                dist.all_reduce(low)
            self.mean[i].mul_(0.8).add_(low)
            p.sub_(self.lr * basis @ self.mean[i])
        for p in self.rest:
            if world > 1:
                dist.all_reduce(p.grad)
            p.sub_(self.lr * p.grad)
        self.count += 1


torch.manual_seed(26)
net = nn.ModuleDict(
    {"enter": nn.Linear(8, 4), "hidden": nn.ModuleList(nn.Linear(4 if i == 0 else 24, 24) for i in range(3))}
)
net["leave"] = nn.Linear(24, 2)
optimizer = Projected(net, 0.1)
for step in range(1, 7):
    x = torch.randn(24, 8, generator=torch.Generator().manual_seed(step))
    y = torch.stack([x[:, :2].prod(1), x[:, 2:].sum(1)], 1)
    h = net["enter"](x[rank::world])
    for layer in net["hidden"]:
        h = torch.tanh(layer(h))
    loss = F.mse_loss(net["leave"](h), y[rank::world]) / world
    net.zero_grad()
    loss.backward()
    optimizer.step()
    shown = loss.detach()
    if world > 1:
        dist.all_reduce(shown)
    if rank == 0:
        print(f"step {step} loss {shown.item():.7f}", flush=True)
if "--save" in sys.argv:
    torch.save(net.state_dict(), os.path.join(sys.argv[sys.argv.index("--save") + 1], f"rank{rank}.pt"))
if world > 1:
    dist.destroy_process_group()
