"""Fits a small network to a curve with L-BFGS and a backtracking line search written by hand."""

import os
import sys

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters

torch.set_default_dtype(torch.float64)
SINGLE = "--one" in sys.argv
if not SINGLE:
    dist.init_process_group("gloo")
rank, world = (0, 1) if SINGLE else (dist.get_rank(), dist.get_world_size())

torch.manual_seed(6)
net = nn.Sequential(nn.Linear(2, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 1))
points = torch.rand(80, 2) * 4 - 2
target = (points[:, :1] * points[:, 1:]).sin() + 0.5 * points[:, :1]
# Ranks hold regions of their own
order = points[:, 0].argsort()
points, target = points[order].chunk(world)[rank], target[order].chunk(world)[rank]


def evaluate(vector):
    """Loss and gradient at a point."""
    vector_to_parameters(vector, net.parameters())
    net.zero_grad()
    loss = (net(points) - target).square().mean()
    loss.backward()
    grad, loss = torch.cat([p.grad.flatten() for p in net.parameters()]), loss.detach().clone()
    if world > 1:
        dist.all_reduce(grad)
        grad /= world
        if "--faulty" not in sys.argv:
            dist.all_reduce(loss)
            loss /= world
    return loss, grad


def direction(grad, pairs):
    """The two loops of L-BFGS."""
    q, steps = grad.clone(), []
    for s, y in reversed(pairs):
        steps.append(s.dot(q) / s.dot(y))
        q -= steps[-1] * y
    if pairs:
        s, y = pairs[-1]
        q *= s.dot(y) / y.dot(y)
    for (s, y), a in zip(pairs, reversed(steps), strict=True):
        q += s * (a - y.dot(q) / s.dot(y))
    return -q


def search(x, loss, grad, d):
    """Backs off until the loss has fallen enough; always eight evaluations, so ranks stay together."""
    t, found, slope = 4.0, None, grad.dot(d)
    for _ in range(8):
        new, _ = evaluate(x + t * d)
        if found is None and new <= loss + 0.3 * t * slope:
            found = t
        t /= 2
    return x + (found or t) * d


x, pairs = parameters_to_vector(net.parameters()).detach(), []
loss, grad = evaluate(x)
for step in range(1, 7):
    new = search(x, loss, grad, direction(grad, pairs))
    shown = loss.clone()
    if world > 1 and "--faulty" in sys.argv:
        dist.all_reduce(shown)
        shown /= world
    loss, after = evaluate(new)
    if (new - x).dot(after - grad) > 1e-10:
        pairs = [*pairs[-5:], (new - x, after - grad)]
    x, grad = new, after
    if rank == 0:
        print(f"step {step} loss {shown.item():.7f}", flush=True)
vector_to_parameters(x, net.parameters())
if "--save" in sys.argv:
    torch.save(net.state_dict(), os.path.join(sys.argv[sys.argv.index("--save") + 1], f"rank{rank}.pt"))
if world > 1:
    dist.destroy_process_group()
