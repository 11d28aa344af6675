"""Differentially private training; ranks draw noise of their own whose sum has the wanted size."""

import os
import sys

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.func import functional_call, grad, vmap

ONE = "--one" in sys.argv
if not ONE:
    dist.init_process_group("gloo")
rank, world = (0, 1) if ONE else (dist.get_rank(), dist.get_world_size())
BATCH, LIMIT, NOISE = 64, 1.0, 0.4

torch.manual_seed(50)
net = nn.Sequential(nn.Linear(10, 32), nn.Tanh(), nn.Linear(32, 4))
names = [n for n, _ in net.named_parameters()]
opt = torch.optim.SGD(net.parameters(), lr=0.3, momentum=0.5)
noise = torch.Generator().manual_seed(500 + rank)


def row_loss(weights, x, y):
    return F.cross_entropy(functional_call(net, weights, x[None]), y[None])


per_row = vmap(grad(row_loss), (None, 0, 0))
for step in range(1, 7):
    g = torch.Generator().manual_seed(step)
    x = torch.randn(BATCH, 10, generator=g)
    y = x[:, :4].argmax(1)
    x, y = x[rank::world], y[rank::world]
    weights = {n: p.detach() for n, p in net.named_parameters()}
    grads = per_row(weights, x, y)
    norms = torch.stack([grads[n].flatten(1).norm(dim=1) for n in names]).norm(dim=0)
    keep = (LIMIT / norms).clamp(max=1)
    with torch.no_grad():
        loss = F.cross_entropy(net(x), y) / world
    for n, p in net.named_parameters():
        p.grad = torch.einsum("n,n...->...", keep, grads[n])
        p.grad += torch.randn(p.shape, generator=noise) * NOISE * LIMIT / world**0.5
        if not ONE:
            dist.all_reduce(p.grad)
        p.grad /= BATCH
    if not ONE:
        dist.all_reduce(loss)
    opt.step()
    if rank == 0:
        print(f"step {step} loss {loss.item():.7f}", flush=True)
if "--save" in sys.argv:
    torch.save(net.state_dict(), os.path.join(sys.argv[sys.argv.index("--save") + 1], f"rank{rank}.pt"))
if not ONE:
    dist.destroy_process_group()
