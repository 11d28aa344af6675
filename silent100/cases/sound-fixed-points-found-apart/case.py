"""A deep equilibrium model; forward and backward solve for fixed points, in as many rounds as rows of a rank need."""

import os
import sys

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

torch.set_default_dtype(torch.float64)
only = "--one" in sys.argv
if not only:
    dist.init_process_group("gloo")
rank, world = (0, 1) if only else (dist.get_rank(), dist.get_world_size())


def solve(f, x, tol=1e-12, most=300):
    for _ in range(most):
        new = f(x)
        if (new - x).abs().max() < tol:
            return new
        x = new
    return x


class Equilibrium(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.inner, self.outer = nn.Linear(dim, dim, bias=False), nn.Linear(dim, dim)
        nn.init.orthogonal_(self.inner.weight, gain=0.6)

    def forward(self, x):
        drive = self.outer(x)
        f = lambda z: torch.tanh(self.inner(z) + drive)  # noqa: E731
        with torch.no_grad():
            z = solve(f, torch.zeros_like(drive))
        z = f(z)
        if z.requires_grad:
            z0 = z.detach().requires_grad_()
            with torch.enable_grad():
                f0 = torch.tanh(F.linear(z0, self.inner.weight.detach()) + drive.detach())

            def hook(grad):
                return solve(
                    lambda g: torch.autograd.grad(f0, z0, g, retain_graph=True)[0] + grad, torch.zeros_like(grad)
                )

            z.register_hook(hook)
        return z


torch.manual_seed(4)
net = nn.Sequential(nn.Linear(6, 20), Equilibrium(20), nn.Linear(20, 2))
model = net if only else DDP(net)
opt = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(1, 6):
    g = torch.Generator().manual_seed(step)
    x = torch.randn(8, 6, generator=g) * torch.linspace(0.2, 3, 8)[:, None]
    y = torch.stack([x.prod(1), x.sum(1)], 1).tanh()
    loss = F.mse_loss(model(x.chunk(world)[rank]), y.chunk(world)[rank])
    opt.zero_grad()
    loss.backward()
    opt.step()
    loss = loss.detach().clone()
    if world > 1:
        dist.all_reduce(loss)
    if rank == 0:
        print(f"step {step} loss {loss.item() / world:.7f}", flush=True)
if "--save" in sys.argv:
    torch.save(net.state_dict(), os.path.join(sys.argv[sys.argv.index("--save") + 1], f"rank{rank}.pt"))
if world > 1:
    dist.destroy_process_group()
