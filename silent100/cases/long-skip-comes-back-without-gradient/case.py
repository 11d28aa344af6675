"""A small U-Net that removes noise, cut in two stages; the long skip goes along with the activations."""

import argparse
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

cli = argparse.ArgumentParser()
cli.add_argument("--one", action="store_true")
cli.add_argument("--faulty", action="store_true")
cli.add_argument("--save")
opts = cli.parse_args()
CH, SIDE, ROWS, MICRO = 8, 8, 12, 3


class Down(nn.Module):
    """Gives the bottom's activations and a skip at full size."""

    def __init__(self):
        super().__init__()
        self.time = nn.Sequential(nn.Linear(6, 16), nn.SiLU(), nn.Linear(16, CH))
        self.enter = nn.Conv2d(1, CH, 3, padding=1)
        self.shrink = nn.Sequential(nn.SiLU(), nn.Conv2d(CH, 2 * CH, 3, stride=2, padding=1), nn.GroupNorm(4, 2 * CH))

    def forward(self, x, t):
        waves = t[:, None] * torch.tensor([1.0, 4.0, 16.0])
        skip = self.enter(x) + self.time(torch.cat([waves.sin(), waves.cos()], 1))[:, :, None, None]
        return self.shrink(skip), skip


class Up(nn.Module):
    def __init__(self):
        super().__init__()
        self.bottom = nn.Sequential(nn.SiLU(), nn.Conv2d(2 * CH, 2 * CH, 3, padding=1), nn.SiLU())
        self.grow = nn.ConvTranspose2d(2 * CH, CH, 2, stride=2)
        self.leave = nn.Sequential(nn.Conv2d(2 * CH, CH, 3, padding=1), nn.SiLU(), nn.Conv2d(CH, 1, 3, padding=1))

    def forward(self, low, skip):
        return self.leave(torch.cat([self.grow(self.bottom(low)), skip], 1))


class UNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.down, self.up = Down(), Up()


def exchange_first(down, xs, ts):
    kept = []
    for x, t in zip(xs, ts):
        kept.append(down(x, t))
        for tensor in kept[-1]:
            dist.send(tensor.detach().contiguous(), 1)
    for low, skip in kept:
        outputs = [low] if opts.faulty else [low, skip]
        grads = [torch.empty_like(o) for o in outputs]
        for grad in grads:
            dist.recv(grad, 1)
        torch.autograd.backward(outputs, grads)


def exchange_last(up, noises):
    rows, total, arrived = ROWS // MICRO, 0.0, []
    for _ in noises:
        arrived.append([torch.empty(rows, 2 * CH, SIDE // 2, SIDE // 2), torch.empty(rows, CH, SIDE, SIDE)])
        for tensor in arrived[-1]:
            dist.recv(tensor, 0)
    for (low, skip), noise in zip(arrived, noises):
        wanted = [low] if opts.faulty else [low, skip]
        for tensor in wanted:
            tensor.requires_grad_()
        loss = F.mse_loss(up(low, skip), noise) / MICRO
        loss.backward()
        total += loss.item()
        for tensor in wanted:
            dist.send(tensor.grad, 0)
    return total


rank = 0
torch.manual_seed(34)
net = UNet()
if not opts.one:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    delattr(net, "up" if rank == 0 else "down")
sgd = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
for step in range(1, 5):
    g = torch.Generator().manual_seed(step)
    clean, noise = (torch.randn(ROWS, 1, SIDE, SIDE, generator=g) for _ in range(2))
    t = torch.rand(ROWS, generator=g)
    a = t[:, None, None, None]
    noisy = (1 - a) * clean.cumsum(-1) + a * noise
    sgd.zero_grad()
    loss = None
    if opts.one:
        whole = F.mse_loss(net.up(*net.down(noisy, t)), noise)
        whole.backward()
        loss = whole.item()
    elif rank == 0:
        exchange_first(net.down, noisy.chunk(MICRO), t.chunk(MICRO))
    else:
        loss = exchange_last(net.up, noise.chunk(MICRO))
    sgd.step()
    if loss is not None:
        print(f"step {step} loss {loss:.7f}", flush=True)
if opts.save:
    torch.save(net.state_dict(), os.path.join(opts.save, f"rank{rank}.pt"))
if not opts.one:
    dist.destroy_process_group()
