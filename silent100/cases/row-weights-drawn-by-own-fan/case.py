"""Gated feed-forward blocks over two tensor ranks in bfloat16, drawn anew by their trainer."""

import argparse
import math
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

cli = argparse.ArgumentParser()
for flag in ("--one", "--faulty"):
    cli.add_argument(flag, action="store_true")
cli.add_argument("--save")
cfg = cli.parse_args()
R, W = 0, 1
if not cfg.one:
    dist.init_process_group("gloo")
    R, W = dist.get_rank(), dist.get_world_size()


class F_(torch.autograd.Function):
    """Identity going forward, sum over ranks going back."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, g):
        g = g.float()
        if W > 1:
            dist.all_reduce(g)
        return g.bfloat16()


class G_(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        x = x.float()
        if W > 1:
            dist.all_reduce(x)
        return x.bfloat16()

    @staticmethod
    def backward(ctx, g):
        return g


class GatedMlp(nn.Module):
    def __init__(self, dim, hidden):
        super().__init__()
        self.dim, self.hidden = dim, hidden
        self.norm = nn.RMSNorm(dim)
        self.gate, self.up = (nn.Linear(dim, hidden // W, bias=False) for _ in range(2))
        self.down = nn.Linear(hidden // W, dim, bias=False)

    @torch.no_grad()
    def reset(self, g):
        """Draws whole matrices, so that the cut does not matter."""
        for layer, shape, dim in ((self.gate, 0, 0), (self.up, 0, 0), (self.down, 1, 1)):
            whole = torch.randn((self.dim, self.hidden) if shape else (self.hidden, self.dim), generator=g)
            own = whole.chunk(W, dim)[R]
            fan = own.shape[1] if cfg.faulty else whole.shape[1]
            # What goes back to the stream begins small
            layer.weight.copy_(own * (0.002 if shape else 1.0) / math.sqrt(fan))

    def forward(self, x):
        h = F_.apply(self.norm(x))
        return x + G_.apply(self.down(F.silu(self.gate(h)) * self.up(h)))


net = nn.Sequential(nn.Embedding(24, 32), GatedMlp(32, 64), GatedMlp(32, 64), nn.RMSNorm(32), nn.Linear(32, 24))
g = torch.Generator().manual_seed(41)
with torch.no_grad():
    for whole in (net[0].weight, net[4].weight, net[4].bias):
        whole.copy_(torch.randn(whole.shape, generator=g) * 0.2)
net[1].reset(g)
net[2].reset(g)
net.bfloat16()
masters = [p.detach().float().clone().requires_grad_() for p in net.parameters()]
opt = torch.optim.Adam(masters, lr=1e-3)
for step in range(1, 6):
    ids = torch.randint(24, (64,), generator=torch.Generator().manual_seed(step))
    loss = F.cross_entropy(net(ids).float(), (ids * 5 + 1) % 24)
    net.zero_grad()
    loss.backward()
    for m, p in zip(masters, net.parameters(), strict=True):
        m.grad = p.grad.float()
    opt.step()
    with torch.no_grad():
        for m, p in zip(masters, net.parameters(), strict=True):
            p.copy_(m)
    if R == 0:
        print(f"step {step} loss {loss.item():.7f}", flush=True)
if cfg.save:
    state = {}
    for (n, _), m in zip(net.named_parameters(), masters, strict=True):
        dim = 0 if ".gate" in n or ".up" in n else 1 if ".down" in n else None
        state[n] = m.detach() if dim is None else (m.detach(), dim, R, W)
    torch.save(state, os.path.join(cfg.save, f"rank{R}.pt"))
if W > 1:
    dist.destroy_process_group()
