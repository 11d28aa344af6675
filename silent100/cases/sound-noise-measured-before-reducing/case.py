"""Estimates the gradient noise scale from the difference of local and global gradients."""

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


class Attend(nn.Module):
    def __init__(self, d=24):
        super().__init__()
        self.norm = nn.LayerNorm(d)
        self.attention = nn.MultiheadAttention(d, 4, bias=False, batch_first=True)

    def forward(self, x):
        h = self.norm(x)
        return x + self.attention(h, h, h, need_weights=False)[0]


def noise_scale(local, reduced, rows):
    """Returns an unbiased estimate after McCandlish et al."""
    small = sum(g.square().sum() for g in local)
    dist.all_reduce(small)
    small, big = small.item() / world, sum(g.square().sum().item() for g in reduced)
    b, s = rows, rows / world
    return (small - big) / (1 / s - 1 / b) / max((b * big - s * small) / (b - s), 1e-9)


torch.manual_seed(10)
net = nn.Sequential(nn.Embedding(32, 24), Attend(), Attend(), nn.Linear(24, 32))
optimizer = torch.optim.SGD(net.parameters(), lr=0.3, momentum=0.9)
scales = []
for step in range(1, 5):
    rows = torch.randint(0, 32, (12, 11), generator=torch.Generator().manual_seed(step))[rank::world]
    loss = F.cross_entropy(net(rows[:, :-1]).transpose(1, 2), rows[:, 1:])
    optimizer.zero_grad()
    loss.backward()
    shown = loss.detach().clone()
    if not ONE:
        local = [p.grad.clone() for p in net.parameters()]
        for p in net.parameters():
            dist.all_reduce(p.grad)
            p.grad /= world
        scales.append(noise_scale(local, [p.grad for p in net.parameters()], 12))
        dist.all_reduce(shown)
    optimizer.step()
    if rank == 0:
        print(f"step {step} loss {shown.item() / world:.7f}", flush=True)
if "--save" in sys.argv:
    torch.save(net.state_dict(), os.path.join(sys.argv[sys.argv.index("--save") + 1], f"rank{rank}.pt"))
if not ONE:
    dist.destroy_process_group()
