"""A critic with a spectrally normalized layer whose output rows are cut over ranks (hinge loss, WGAN style)."""

import os
import sys

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

one, faulty = "--one" in sys.argv, "--faulty" in sys.argv
if one:
    rank, tp = 0, 1
else:
    dist.init_process_group("gloo")
    rank, tp = dist.get_rank(), dist.get_world_size()


def add(x):
    x = x.clone()
    if tp > 1:
        dist.all_reduce(x)
    return x


class Everywhere(torch.autograd.Function):
    """A sum over ranks; ``whole``: the gradient that arrives is the same on all of them."""

    @staticmethod
    def forward(ctx, x, whole):
        ctx.whole = whole
        return add(x)

    @staticmethod
    def backward(ctx, g):
        return g if ctx.whole else add(g.contiguous()), None


class SpectralColumns(nn.Module):
    def __init__(self, inputs, outputs):
        super().__init__()
        self.weight = nn.Parameter((torch.randn(outputs, inputs) * 0.5).chunk(tp)[rank].clone())
        self.register_buffer("u", F.normalize(torch.randn(outputs), dim=0).chunk(tp)[rank].clone())

    def forward(self, x):
        reduce = (lambda t: t) if faulty else add
        with torch.no_grad():
            for _ in range(2):
                v = reduce(self.weight.T @ self.u)
                v /= v.norm()
                u = self.weight @ v
                self.u.copy_(u / reduce(u.square().sum()).sqrt())
        sigma = self.u.clone() @ self.weight @ v
        if not faulty:
            sigma = Everywhere.apply(sigma, False)
        return x @ (self.weight / sigma).T


class Critic(nn.Module):
    def __init__(self):
        super().__init__()
        self.lift = SpectralColumns(8, 24)
        self.fall = nn.Parameter((torch.randn(24) * 0.4).chunk(tp)[rank].clone())

    def forward(self, x):
        return Everywhere.apply(F.leaky_relu(self.lift(x), 0.2) @ self.fall, True)


torch.manual_seed(4)
critic = Critic()
optimizer = torch.optim.SGD(critic.parameters(), lr=0.1, momentum=0.5)
for step in range(1, 6):
    noise = torch.Generator().manual_seed(step)
    real = torch.randn(10, 8, generator=noise) * 0.5 + 1
    fake = torch.randn(10, 8, generator=noise)
    loss = F.relu(1 - critic(real)).mean() + F.relu(1 + critic(fake)).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if rank == 0:
        print(f"step {step} loss {loss.item():.7f}", flush=True)
if "--save" in sys.argv:
    state = {n: (t.detach().clone(), 0, rank, tp) for n, t in critic.state_dict().items()}
    torch.save(state, os.path.join(sys.argv[-1], f"rank{rank}.pt"))
if not one:
    dist.destroy_process_group()
