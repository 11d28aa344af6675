"""Faces: a backbone on every rank, an angular-margin head whose identities are dealt out to ranks."""

import argparse
import math
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

p = argparse.ArgumentParser()
p.add_argument("--one", action="store_true")
p.add_argument("--faulty", action="store_true")
p.add_argument("--save")
cfg = p.parse_args()
R, W = 0, 1
if not cfg.one:
    dist.init_process_group("gloo")
    R, W = dist.get_rank(), dist.get_world_size()
IDENTITIES, MARGIN, SCALE = 12, 0.2, 8.0


class AllRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx, z):
        if W == 1:
            return z.clone()
        parts = [torch.empty_like(z) for _ in range(W)]
        dist.all_gather(parts, z.contiguous())
        return torch.cat(parts)

    @staticmethod
    def backward(ctx, g):
        if W == 1:
            return g
        g = g.contiguous()
        if not cfg.faulty:
            dist.all_reduce(g)
        return g.chunk(W)[R]


class AddUp(torch.autograd.Function):
    @staticmethod
    def forward(ctx, t):
        t = t.clone()
        if W > 1:
            dist.all_reduce(t)
        return t

    @staticmethod
    def backward(ctx, g):
        return g


class PartialHead(nn.Module):
    def __init__(self, width):
        super().__init__()
        whole = torch.randn(IDENTITIES, width)
        self.centers = nn.Parameter(whole.chunk(W)[R].clone())
        self.first = R * IDENTITIES // W

    def forward(self, z, labels):
        cosine = F.normalize(z) @ F.normalize(self.centers).T
        mine = labels - self.first
        here = (mine >= 0) & (mine < len(self.centers))
        picked = cosine.gather(1, mine.clamp(0, len(self.centers) - 1)[:, None])[:, 0].clamp(-0.999, 0.999)
        turned = picked * math.cos(MARGIN) - (1 - picked**2).sqrt() * math.sin(MARGIN)
        hot = F.one_hot(mine.clamp(0, len(self.centers) - 1), len(self.centers)).bool() & here[:, None]
        logits = SCALE * torch.where(hot, turned[:, None], cosine)
        total = AddUp.apply(logits.exp().sum(1))
        target = AddUp.apply((logits * hot).sum(1))
        return (total.log() - target).mean()


class Faces(nn.Module):
    def __init__(self):
        super().__init__()
        self.backbone = nn.Sequential(
            nn.Conv2d(1, 6, 3, 2, 1), nn.PReLU(), nn.Conv2d(6, 12, 3, 2, 1), nn.PReLU(), nn.Flatten(), nn.Linear(48, 16)
        )
        self.head = PartialHead(16)

    def forward(self, x, labels):
        return self.head(AllRows.apply(self.backbone(x)), labels)


torch.manual_seed(1300)
net = Faces()
opt = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9, weight_decay=5e-4)
for step in range(1, 6):
    g = torch.Generator().manual_seed(step)
    x, y = torch.randn(8, 1, 8, 8, generator=g), torch.randint(0, IDENTITIES, (8,), generator=g)
    loss = net(x.chunk(W)[R], y)
    opt.zero_grad()
    loss.backward()
    if W > 1:
        for w in net.backbone.parameters():
            dist.all_reduce(w.grad)
    opt.step()
    if R == 0:
        print(f"step {step} loss {loss.item():.7f}", flush=True)
if cfg.save:
    state = {n: t.detach() for n, t in net.backbone.named_parameters(prefix="backbone")}
    state["head.centers"] = (net.head.centers.detach(), 0, R, W)
    torch.save(state, os.path.join(cfg.save, f"rank{R}.pt"))
if W > 1:
    dist.destroy_process_group()
