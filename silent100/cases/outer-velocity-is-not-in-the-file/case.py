"""Each process makes its own inner update; the mean difference moves the common weights with Nesterov velocity."""

import os
import sys

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

ONE, FAULTY = "--one" in sys.argv, "--faulty" in sys.argv


class Outer:
    def __init__(self, net, rate=0.7, momentum=0.8):
        self.net, self.rate, self.momentum = net, rate, momentum
        self.start = [p.detach().clone() for p in net.parameters()]
        self.velocity = [torch.zeros_like(p) for p in self.start]

    @torch.no_grad()
    def step(self, world):
        for p, start, velocity in zip(self.net.parameters(), self.start, self.velocity):
            gap = start - p
            if world > 1:
                dist.all_reduce(gap)
                gap /= world
            velocity.mul_(self.momentum).add_(gap)
            start -= self.rate * (gap + self.momentum * velocity)
            p.copy_(start)


def build():
    torch.manual_seed(60)
    net = nn.ModuleDict({"pair": nn.Bilinear(5, 5, 16), "head": nn.Linear(16, 3)})
    return net, torch.optim.SGD(net.parameters(), lr=0.8), Outer(net)


def forward(net, x):
    return net["head"](torch.sigmoid(net["pair"](x[:, :5], x[:, 5:])))


def pack(net, inner, outer):
    state = {"net": net.state_dict(), "inner": inner.state_dict()}
    if not FAULTY:
        state["outer"] = [v.clone() for v in outer.velocity]
    return state


def unpack(state, net, inner, outer):
    net.load_state_dict(state["net"])
    inner.load_state_dict(state["inner"])
    outer.start = [p.detach().clone() for p in net.parameters()]
    for v, kept in zip(outer.velocity, state.get("outer", [])):
        v.copy_(kept)


rank, world = 0, 1
if not ONE:
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
net, inner, outer = build()
for step in range(1, 7):
    if step == 4 and world > 1:
        file = f"outer-{os.getpid()}.pt"
        torch.save(pack(net, inner, outer), file)
        net, inner, outer = build()
        unpack(torch.load(file), net, inner, outer)
        os.remove(file)
    x = torch.randn(21, 10, generator=torch.Generator().manual_seed(step))
    y = (x[:, :5] * x[:, 5:]).view(21, 5)[:, :3].argmax(1)
    loss = F.cross_entropy(forward(net, x[rank::world]), y[rank::world])
    inner.zero_grad()
    loss.backward()
    inner.step()
    outer.step(world)
    loss = loss.detach() / world
    if world > 1:
        dist.all_reduce(loss)
    if rank == 0:
        print(f"step {step} loss {loss.item():.7f}", flush=True)
if "--save" in sys.argv:
    torch.save(net.state_dict(), os.path.join(sys.argv[sys.argv.index("--save") + 1], f"rank{rank}.pt"))
if world > 1:
    dist.destroy_process_group()
