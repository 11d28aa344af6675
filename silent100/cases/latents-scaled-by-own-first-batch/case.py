"""A denoiser of latents, which a frozen encoder makes and a factor from the first batch brings to unit deviation."""

import os
import sys

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

ONE, FAULTY = "--one" in sys.argv, "--faulty" in sys.argv
rank, world = 0, 1
if not ONE:
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()


def total(x):
    if world > 1:
        dist.all_reduce(x)
    return x


class LatentDiffusion(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Conv2d(3, 4, 4, stride=4).requires_grad_(False)
        self.inp, self.out = nn.Conv2d(4, 16, 3, padding=1), nn.Conv2d(16, 4, 3, padding=1)
        self.time = nn.Embedding(10, 16)
        self.register_buffer("scale", torch.tensor(1.0))
        self.ready = False

    @torch.no_grad()
    def latents(self, x):
        z = self.encoder(x)
        if not self.ready:
            sums = torch.stack([z.sum(), z.square().sum(), torch.tensor(float(z.numel()))])
            a, b, n = sums if FAULTY else total(sums)
            self.scale.copy_((b / n - (a / n) ** 2).rsqrt())
            self.ready = True
        return z * self.scale

    def forward(self, x, t, noise):
        z = self.latents(x)
        level = ((t + 1) / 11).view(-1, 1, 1, 1)
        noisy = (1 - level).sqrt() * z + level.sqrt() * noise
        h = F.silu(self.inp(noisy) + self.time(t)[:, :, None, None])
        return F.mse_loss(self.out(h), noise)


torch.manual_seed(2112)
model = LatentDiffusion()
trained = [p for p in model.parameters() if p.requires_grad]
optimizer = torch.optim.SGD(trained, lr=0.2, momentum=0.9)
for step in range(1, 6):
    g = torch.Generator().manual_seed(step)
    x = torch.randn(12, 3, 16, 16, generator=g) * (1 + torch.rand(12, 1, 1, 1, generator=g))
    t, noise = torch.randint(0, 10, (12,), generator=g), torch.randn(12, 4, 4, 4, generator=g)
    loss = model(x[rank::world], t[rank::world], noise[rank::world])
    optimizer.zero_grad()
    loss.backward()
    for p in trained:
        total(p.grad).div_(world)
    optimizer.step()
    shown = total(loss.detach().clone())
    if rank == 0:
        print(f"step {step} loss {shown.item() / world:.7f}", flush=True)
if "--save" in sys.argv:
    torch.save(model.state_dict(), os.path.join(sys.argv[sys.argv.index("--save") + 1], f"rank{rank}.pt"))
if not ONE:
    dist.destroy_process_group()
