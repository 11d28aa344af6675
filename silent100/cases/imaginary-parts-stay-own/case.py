"""A Fourier neural operator on a circle, whose spectral weights are complex."""

import os
import sys

import torch
import torch.distributed as dist
import torch.nn as nn


class Spectral(nn.Module):
    def __init__(self, width, modes):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(width, width, modes, dtype=torch.cfloat) / width)

    def forward(self, x):
        modes = self.weight.shape[-1]
        low = torch.fft.rfft(x)[..., :modes]
        return torch.fft.irfft(torch.einsum("bik,iok->bok", low, self.weight), n=x.shape[-1])


class Operator(nn.Module):
    def __init__(self, width=10, modes=5, depth=2):
        super().__init__()
        self.lift, self.project = nn.Conv1d(1, width, 1), nn.Conv1d(width, 1, 1)
        self.spectral = nn.ModuleList(Spectral(width, modes) for _ in range(depth))
        self.local = nn.ModuleList(nn.Conv1d(width, width, 1) for _ in range(depth))

    def forward(self, x):
        x = self.lift(x)
        for far, near in zip(self.spectral, self.local):
            x = torch.nn.functional.gelu(far(x) + near(x))
        return self.project(x)


def reduce(p, world, faulty):
    if not p.is_complex():
        dist.all_reduce(p.grad)
    elif faulty:
        real = p.grad.real.contiguous()
        dist.all_reduce(real)
        p.grad = torch.complex(real, p.grad.imag * world)
    else:
        dist.all_reduce(torch.view_as_real(p.grad))
    p.grad /= world


if __name__ == "__main__":
    one, faulty = "--one" in sys.argv, "--faulty" in sys.argv
    rank, world = 0, 1
    if not one:
        dist.init_process_group("gloo")
        rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(36)
    net = Operator()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    for step in range(1, 7):
        g = torch.Generator().manual_seed(step)
        waves = torch.randn(12, 1, 4, generator=g)
        t = torch.arange(32) * 2 * torch.pi / 32
        x = (waves[..., None] * torch.sin(torch.arange(1, 5)[:, None] * t + waves[..., None])).sum(2)
        y = x.roll(5, -1).tanh()
        optimizer.zero_grad()
        loss = (net(x[rank::world]) - y[rank::world]).square().mean()
        loss.backward()
        loss = loss.detach()
        if world > 1:
            for p in net.parameters():
                reduce(p, world, faulty)
            dist.all_reduce(loss)
        optimizer.step()
        if rank == 0:
            print(f"step {step} loss {loss.item() / world:.7f}", flush=True)
    if "--save" in sys.argv:
        state = {n: torch.view_as_real(p) if p.is_complex() else p for n, p in net.state_dict().items()}
        torch.save(state, os.path.join(sys.argv[sys.argv.index("--save") + 1], f"rank{rank}.pt"))
    if world > 1:
        dist.destroy_process_group()
