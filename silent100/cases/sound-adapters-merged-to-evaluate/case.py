"""Adapters are added to their weights for an evaluation on rank 0, and taken out again, which leaves rounding."""

import os
import sys

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

ALONE = "--one" in sys.argv


class Adapted(nn.Linear):
    def __init__(self, a, b):
        super().__init__(a, b)
        self.weight.requires_grad_(False)
        self.down, self.up = nn.Parameter(torch.randn(2, a) / 3), nn.Parameter(torch.zeros(b, 2))
        self.merged = False

    @torch.no_grad()
    def merge(self, on):
        self.weight.add_(self.up @ self.down, alpha=1.0 if on else -1.0)
        self.merged = on

    def forward(self, x):
        y = super().forward(x)
        return y if self.merged else y + F.linear(F.linear(x, self.down), self.up)


def evaluate(net):
    adapted = [m for m in net if isinstance(m, Adapted)]
    net.eval()
    for m in adapted:
        m.merge(True)
    with torch.no_grad():
        net(torch.linspace(-1, 1, 21).view(3, 7))
    for m in adapted:
        m.merge(False)
    net.train()


def main():
    rank, world = 0, 1
    if not ALONE:
        dist.init_process_group("gloo")
        rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(5)
    net = nn.Sequential(Adapted(7, 32), nn.Tanh(), Adapted(32, 32), nn.Tanh(), Adapted(32, 2))
    optimizer = torch.optim.Adamax([p for p in net.parameters() if p.requires_grad], lr=0.02, eps=1e-4)
    for step in range(1, 7):
        g = torch.Generator().manual_seed(step)
        x = torch.randn(12, 7, generator=g)
        y = torch.stack([x.prod(1), x.sum(1).sin()], 1)
        loss = F.smooth_l1_loss(net(x[rank::world]), y[rank::world])
        optimizer.zero_grad()
        loss.backward()
        loss = loss.detach()
        if world > 1:
            for p in net.parameters():
                if p.grad is not None:
                    dist.all_reduce(p.grad)
                    p.grad /= world
            dist.all_reduce(loss)
        optimizer.step()
        if rank == 0 and world > 1 and step % 2 == 0:
            evaluate(net)
        if rank == 0:
            print(f"step {step} loss {loss.item() / world:.7f}", flush=True)
    if "--save" in sys.argv:
        torch.save(net.state_dict(), os.path.join(sys.argv[sys.argv.index("--save") + 1], f"rank{rank}.pt"))
    if world > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
