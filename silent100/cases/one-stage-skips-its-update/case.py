"""Two pipeline stages with a loss scale; float16 gradients that overflow make the update fall out."""

import os
import sys

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

ONE, FAULTY = "--one" in sys.argv, "--faulty" in sys.argv
rank = 0
if not ONE:
    dist.init_process_group("gloo")
    rank = dist.get_rank()


class Stage(nn.Module):
    def __init__(self, layers):
        super().__init__()
        for name, layer in layers.items():
            self.add_module(name, layer)

    def forward(self, x):
        for layer in self.children():
            x = torch.relu(layer(x)) if layer is not list(self.children())[-1] else layer(x)
        return x


class Scaler:
    """Halves the scale when something is not finite, else lets it grow."""

    def __init__(self, scale=256.0):
        self.scale, self.good = scale, 0

    def step(self, optimizer, params):
        bad = torch.zeros(())
        for p in params:
            p.grad = p.grad.half().float() / self.scale
            bad += (~p.grad.isfinite()).any()
        if not ONE and not FAULTY:
            dist.all_reduce(bad)
        if bad:
            self.scale, self.good = self.scale / 2, 0
            return
        optimizer.step()


torch.manual_seed(19)
lower = {"enter": nn.Linear(7, 20), "lower": nn.Linear(20, 20)}
upper = {"upper": nn.Linear(20, 20), "leave": nn.Linear(20, 3)}
if ONE:
    net = Stage(lower | upper)
else:
    net = Stage(upper if rank else lower)
opt = torch.optim.Adam(net.parameters(), lr=3e-3)
scaler = Scaler()
for step in range(1, 7):
    g = torch.Generator().manual_seed(step)
    x, y = torch.randn(16, 7, generator=g), torch.randn(16, 3, generator=g)
    if step == 3:
        y = y + 3000.0  # somebody forgot a decimal point
    opt.zero_grad()
    loss = torch.zeros(())
    if ONE:
        loss = F.smooth_l1_loss(net(x), y, beta=1e4) * 1e4
        (loss * scaler.scale).backward()
    elif rank == 0:
        h = net(x)
        dist.send(h.detach(), 1)
        back = torch.empty_like(h)
        dist.recv(back, 1)
        h.backward(back)
        dist.recv(loss, 1)
    else:
        h = torch.empty(16, 20)
        dist.recv(h, 0)
        h.requires_grad_()
        loss = F.smooth_l1_loss(net(torch.relu(h)), y, beta=1e4) * 1e4
        (loss * scaler.scale).backward()
        dist.send(h.grad, 0)
        dist.send(loss.detach(), 0)
    scaler.step(opt, list(net.parameters()))
    if rank == 0:
        print(f"step {step} loss {loss.item():.7f}", flush=True)
if "--save" in sys.argv:
    torch.save(net.state_dict(), os.path.join(sys.argv[sys.argv.index("--save") + 1], f"rank{rank}.pt"))
if not ONE:
    dist.destroy_process_group()
