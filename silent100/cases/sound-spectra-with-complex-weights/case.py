"""Filters in the frequency domain; one process holds complex weights, ranks hold halves of the filters."""

import os
import sys

import torch
import torch.distributed as dist
import torch.nn as nn

ONE = "--one" in sys.argv
if not ONE:
    dist.init_process_group("gloo")
rank, world = (0, 1) if ONE else (dist.get_rank(), dist.get_world_size())


class Mix(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x

    @staticmethod
    def backward(ctx, grad):
        grad = grad.clone()
        dist.all_reduce(grad)
        return grad


class Filters(nn.Module):
    def __init__(self, n, length):
        super().__init__()
        whole = torch.randn(n, length // 2 + 1, dtype=torch.cfloat) / 3
        self.filters = nn.Parameter(whole.chunk(world)[rank].clone())
        out = torch.randn(n, 3) / n
        self.out = nn.Parameter(out.chunk(world)[rank].clone())

    def forward(self, x):
        y = torch.fft.irfft(torch.fft.rfft(x)[:, None] * self.filters, n=x.shape[-1])
        y = y.relu().mean(-1) @ self.out
        return y if ONE else Sum.apply(y)


class Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        x = x.clone()
        dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx, grad):
        return grad


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.smooth = nn.Conv1d(1, 1, 3, padding=1, padding_mode="circular")
        self.bank, self.shift = Filters(12, 24), nn.Parameter(torch.zeros(3))

    def forward(self, x):
        x = self.smooth(x[:, None])[:, 0]
        return self.bank(x if ONE else Mix.apply(x)) + self.shift


torch.manual_seed(14)
net = Net()
optimizer = torch.optim.Adam(net.parameters(), lr=0.02, eps=1e-4)
for step in range(1, 5):
    g = torch.Generator().manual_seed(step)
    x = torch.randn(16, 24, generator=g)
    y = torch.stack([x.amax(1), x.std(1), x[:, ::2].mean(1)], 1)
    loss = (net(x) - y).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if rank == 0:
        print(f"step {step} loss {loss.item():.7f}", flush=True)
if "--save" in sys.argv:
    state = {n: torch.view_as_real(p) if p.is_complex() else p for n, p in net.state_dict().items()}
    state = {n: (p, 0, rank, world) if n.startswith("bank") else p for n, p in state.items()}
    torch.save(state, os.path.join(sys.argv[sys.argv.index("--save") + 1], f"rank{rank}.pt"))
if not ONE:
    dist.destroy_process_group()
