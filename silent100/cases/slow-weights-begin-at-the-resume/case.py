"""Lookahead with SGD: every second update goes half of the way back to slow weights; stopped after three updates."""

import os
import sys
import tempfile

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

ONE = "--one" in sys.argv


class LookaheadSGD(torch.optim.Optimizer):
    def __init__(self, params, lr, momentum=0.9, every=2, share=0.5):
        super().__init__(params, {"lr": lr, "momentum": momentum})
        self.every, self.share, self.count = every, share, 0
        self.slow = [p.detach().clone() for p in self.all_params()]

    def all_params(self):
        return [p for group in self.param_groups for p in group["params"]]

    @torch.no_grad()
    def step(self):
        self.count += 1
        for group in self.param_groups:
            for p in group["params"]:
                velocity = self.state[p].setdefault("velocity", torch.zeros_like(p))
                velocity.mul_(group["momentum"]).add_(p.grad)
                p.sub_(velocity, alpha=group["lr"])
        if self.count % self.every == 0:
            for p, slow in zip(self.all_params(), self.slow):
                slow.lerp_(p, self.share)
                p.copy_(slow)

    def state_dict(self):
        return {"inner": super().state_dict(), "slow": self.slow, "count": self.count}

    def load_state_dict(self, state):
        super().load_state_dict(state["inner"])
        self.count = state["count"]
        if "--faulty" in sys.argv:
            self.slow = [p.detach().clone() for p in self.all_params()]
        else:
            self.slow = [slow.clone() for slow in state["slow"]]


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(1, 8, 3, padding=1), nn.Conv2d(8, 12, 3, stride=2, padding=1)
        self.norm, self.fc, self.head = nn.GroupNorm(3, 12), nn.Linear(12 * 16, 32), nn.Linear(32, 4)

    def forward(self, x):
        x = F.relu(self.norm(self.conv2(F.relu(self.conv1(x)))))
        return self.head(F.relu(self.fc(x.flatten(1))))


def build():
    net = Net()
    return net, LookaheadSGD(net.parameters(), lr=0.1)


def train(net, optimizer, steps, rank, world):
    for step in steps:
        g = torch.Generator().manual_seed(step)
        x = torch.randn(16, 1, 8, 8, generator=g)
        y = (x[:, 0, :4].mean((1, 2)) > 0).long() + 2 * (x[:, 0, :, :4].mean((1, 2)) > 0).long()
        loss = F.cross_entropy(net(x[rank::world]), y[rank::world]) / world
        net.zero_grad()
        loss.backward()
        shown = loss.detach()
        if world > 1:
            for t in [shown] + [p.grad for p in net.parameters()]:
                dist.all_reduce(t)
        optimizer.step()
        if rank == 0:
            print(f"step {step} loss {shown.item():.7f}", flush=True)


rank, world = 0, 1
if not ONE:
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(43)
net, optimizer = build()
if ONE:
    train(net, optimizer, range(1, 7), rank, world)
else:
    train(net, optimizer, range(1, 4), rank, world)
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, f"rank{rank}.ckpt")
        torch.save({"net": net.state_dict(), "optimizer": optimizer.state_dict()}, path)
        net, optimizer = build()
        checkpoint = torch.load(path)
    net.load_state_dict(checkpoint["net"])
    optimizer.load_state_dict(checkpoint["optimizer"])
    train(net, optimizer, range(4, 7), rank, world)
if "--save" in sys.argv:
    torch.save(net.state_dict(), os.path.join(sys.argv[sys.argv.index("--save") + 1], f"rank{rank}.pt"))
if not ONE:
    dist.destroy_process_group()
