import argparse
import math

import torch
import torch.distributed as dist
import torch.nn as nn

cli = argparse.ArgumentParser()
cli.add_argument("--one", action="store_true")
cli.add_argument("--save", default="")
cli = cli.parse_args()
torch.set_default_dtype(torch.float64)
rank, world = 0, 1
if not cli.one:
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()


class VAE(nn.Module):
    def __init__(self, d=14, h=24, z=4):
        super().__init__()
        self.enc = nn.Sequential(nn.Linear(d, h), nn.Tanh(), nn.Linear(h, 2 * z))
        self.dec = nn.Sequential(nn.Linear(z, h), nn.Tanh(), nn.Linear(h, d))

    def forward(self, x, eps, beta):
        mu, logvar = self.enc(x).chunk(2, -1)
        rec = self.dec(mu + eps * (0.5 * logvar).exp())
        kl = 0.5 * (mu**2 + logvar.exp() - 1 - logvar).sum(-1)
        return ((rec - x) ** 2).sum(-1) + beta * kl


class FlatAdam:
    """Adam whose moments exist for this rank's slice of the flat vector only."""

    def __init__(self, module, lr):
        self.params = list(module.parameters())
        self.n = sum(p.numel() for p in self.params)
        self.chunk = math.ceil(self.n / world)
        self.flat = torch.zeros(self.chunk * world)
        self.gflat = torch.zeros_like(self.flat)
        at = 0
        for p in self.params:
            self.flat[at : at + p.numel()] = p.data.flatten()
            p.data = self.flat[at : at + p.numel()].view_as(p)
            p.grad = self.gflat[at : at + p.numel()].view_as(p)
            at += p.numel()
        self.mine = self.flat[rank * self.chunk : (rank + 1) * self.chunk]
        self.m, self.v = torch.zeros(self.chunk), torch.zeros(self.chunk)
        self.t, self.lr = 0, lr

    def step(self):
        g = torch.empty(self.chunk)
        dist.reduce_scatter_tensor(g, self.gflat)
        self.t += 1
        self.m = 0.9 * self.m + 0.1 * g
        self.v = 0.99 * self.v + 0.01 * g * g
        mhat, vhat = self.m / (1 - 0.9**self.t), self.v / (1 - 0.99**self.t)
        dist.all_gather_into_tensor(self.flat, self.mine - self.lr * mhat / (vhat.sqrt() + 1e-8))

    def zero_grad(self):
        self.gflat.zero_()


torch.manual_seed(5)
vae = VAE()
table = torch.randn(60, 14)
opt = torch.optim.Adam(vae.parameters(), lr=0.01, betas=(0.9, 0.99)) if cli.one else FlatAdam(vae, 0.01)


def noise(row, step):
    return torch.randn(4, generator=torch.Generator().manual_seed(100003 * step + row))


for step in range(1, 6):
    ids = torch.randperm(60, generator=torch.Generator().manual_seed(step))[:12].tolist()
    mine = ids[rank * 12 // world : (rank + 1) * 12 // world]
    eps = torch.stack([noise(i, step) for i in mine])
    per_row = vae(table[mine], eps, beta=min(1.0, step / 4))
    loss = per_row.sum() / 12
    opt.zero_grad()
    loss.backward()
    opt.step()
    if world > 1:
        dist.all_reduce(loss.detach_())
    if rank == 0:
        print(f"step {step} loss {loss.item():.7f}", flush=True)

if cli.save:
    torch.save({k: v.clone() for k, v in vae.state_dict().items()}, f"{cli.save}/rank{rank}.pt")
if world > 1:
    dist.destroy_process_group()
