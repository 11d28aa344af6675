"""A soft mixture of experts on patches of pictures: each rank has three of six slots, and their experts."""

import argparse
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

cfg = argparse.ArgumentParser()
cfg.add_argument("--one", action="store_true")
cfg.add_argument("--save")
cfg = cfg.parse_args()
rank, world = 0, 1
if not cfg.one:
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
SLOTS, D = 6, 16


class Across(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, there, back):
        ctx.back = back
        x = x.contiguous().clone()
        if there and world > 1:
            dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx, g):
        g = g.contiguous().clone()
        if ctx.back and world > 1:
            dist.all_reduce(g)
        return g, None, None


class SoftMoE(nn.Module):
    def __init__(self):
        super().__init__()
        piece = lambda *s: nn.Parameter((torch.randn(*s) * 0.25).chunk(world)[rank].clone())  # noqa: E731
        self.slots, self.up, self.down = piece(SLOTS, D), piece(SLOTS, D, 20), piece(SLOTS, 20, D)

    def forward(self, x):
        x_in = Across.apply(x, False, True)
        logits = x_in @ self.slots.T
        taken = logits.softmax(1).transpose(1, 2) @ x_in
        made = torch.einsum("bsh,shd->bsd", F.gelu(torch.einsum("bsd,sdh->bsh", taken, self.up)), self.down)
        share = logits.exp()
        share = share / Across.apply(share.sum(-1, keepdim=True), True, True)
        return x + Across.apply(share @ made, True, False)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.patches = nn.Conv2d(1, D, 3, 3)
        self.moe1, self.moe2 = SoftMoE(), SoftMoE()
        self.head = nn.Linear(D, 5)

    def forward(self, x):
        return self.head(self.moe2(self.moe1(self.patches(x).flatten(2).transpose(1, 2))).mean(1))


torch.manual_seed(19)
net = Net()
optimizer = torch.optim.SGD(net.parameters(), lr=0.3, momentum=0.8)
for step in range(1, 6):
    g = torch.Generator().manual_seed(step)
    x, y = torch.randn(6, 1, 9, 9, generator=g), torch.randint(0, 5, (6,), generator=g)
    loss = F.cross_entropy(net(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if rank == 0:
        print(f"step {step} loss {loss.item():.7f}", flush=True)
if cfg.save:
    state = {n: (p.detach(), 0, rank, world) if "moe" in n else p.detach() for n, p in net.named_parameters()}
    torch.save(state, os.path.join(cfg.save, f"rank{rank}.pt"))
if world > 1:
    dist.destroy_process_group()
