"""A layer of experts whose weights live on one rank each and are fetched when the layer runs."""

import os
import sys

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

ONE = "--one" in sys.argv
if not ONE:
    dist.init_process_group("gloo")
rank, world = (0, 1) if ONE else (dist.get_rank(), dist.get_world_size())

EXPERTS, DIM, HIDDEN = 4, 14, 20


class Fetch(torch.autograd.Function):
    @staticmethod
    def forward(ctx, own):
        if world == 1:
            return own.view_as(own)
        parts = [torch.empty_like(own) for _ in range(world)]
        dist.all_gather(parts, own.contiguous())
        return torch.cat(parts)

    @staticmethod
    def backward(ctx, g):
        if world == 1:
            return g
        home = torch.empty_like(g.chunk(world)[rank].contiguous())
        dist.reduce_scatter_tensor(home, g.contiguous())
        return home


class Moe(nn.Module):
    def __init__(self):
        super().__init__()
        self.router = nn.Linear(DIM, EXPERTS, bias=False)
        up, down = torch.randn(EXPERTS, DIM, HIDDEN) / DIM**0.5, torch.randn(EXPERTS, HIDDEN, DIM) / HIDDEN**0.5
        self.up, self.down = (nn.Parameter(w.chunk(world)[rank].clone()) for w in (up, down))

    def forward(self, x):
        up, down = Fetch.apply(self.up), Fetch.apply(self.down)
        weights, chosen = self.router(x).softmax(-1).max(-1)
        y = torch.zeros_like(x)
        for i in range(EXPERTS):
            rows = (chosen == i).nonzero()[:, 0]
            if len(rows):
                y = y.index_add(0, rows, torch.relu(x[rows] @ up[i]) @ down[i] * weights[rows, None])
        return x + y


torch.manual_seed(70)
net = nn.Sequential(nn.Linear(8, DIM), Moe(), nn.LayerNorm(DIM), Moe(), nn.Linear(DIM, 3))
optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
for step in range(1, 6):
    x = torch.randn(24, 8, generator=torch.Generator().manual_seed(step))
    classes = (x[:, :3] * x[:, 3:6]).argmax(1)
    loss = F.cross_entropy(net(x[rank::world]), classes[rank::world]) / world
    optimizer.zero_grad()
    loss.backward()
    shown = loss.detach()
    if world > 1:
        for n, p in net.named_parameters():
            if n.split(".")[-1] not in ("up", "down"):
                dist.all_reduce(p.grad)
        dist.all_reduce(shown)
    optimizer.step()
    if rank == 0:
        print(f"step {step} loss {shown.item():.7f}", flush=True)
state = {n: (p.detach(), 0, rank, world) if p.ndim == 3 else p.detach() for n, p in net.named_parameters()}
if "--save" in sys.argv:
    torch.save(state, os.path.join(sys.argv[sys.argv.index("--save") + 1], f"rank{rank}.pt"))
if world > 1:
    dist.destroy_process_group()
