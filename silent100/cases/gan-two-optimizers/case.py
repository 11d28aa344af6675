import argparse

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

p = argparse.ArgumentParser()
p.add_argument("--one", action="store_true")
p.add_argument("--save")
a = p.parse_args()
torch.set_default_dtype(torch.float64)
distributed = not a.one
if distributed:
    dist.init_process_group("gloo")
rank = dist.get_rank() if distributed else 0
world = dist.get_world_size() if distributed else 1

torch.manual_seed(99)
G = nn.Sequential(nn.Linear(6, 32), nn.LeakyReLU(0.2), nn.Linear(32, 2))
D = nn.Sequential(nn.Linear(2, 32), nn.LeakyReLU(0.2), nn.Linear(32, 1))
opt_g = torch.optim.Adam(G.parameters(), lr=2e-3, betas=(0.5, 0.999))
opt_d = torch.optim.Adam(D.parameters(), lr=4e-3, betas=(0.5, 0.999))
stream = torch.Generator().manual_seed(7)
BATCH = 32


def mean_grads(module):
    if distributed:
        flat = torch.cat([q.grad.flatten() for q in module.parameters()])
        dist.all_reduce(flat)
        flat /= world
        for q, g in zip(module.parameters(), flat.split([q.numel() for q in module.parameters()])):
            q.grad.copy_(g.view_as(q))


def batch(kind):
    z = torch.randn(BATCH, 6 if kind == "z" else 2, generator=stream)
    if kind == "real":
        z = z * 0.3 + torch.tensor([1.0, -0.5])
    return z.chunk(world)[rank]


for step in range(1, 7):
    for _ in range(2):
        real, z = batch("real"), batch("z")
        with torch.no_grad():
            fake = G(z)
        d_loss = F.softplus(-D(real)).mean() + F.softplus(D(fake)).mean()
        opt_d.zero_grad()
        d_loss.backward()
        mean_grads(D)
        opt_d.step()
    g_loss = F.softplus(-D(G(batch("z")))).mean()
    opt_g.zero_grad()
    g_loss.backward()
    mean_grads(G)
    opt_g.step()
    shown = (d_loss + g_loss).detach()
    if distributed:
        dist.all_reduce(shown)
        shown /= world
    if rank == 0:
        print(f"step {step} loss {shown.item():.7f}", flush=True)

if a.save:
    torch.save(
        {**{f"G.{k}": v for k, v in G.state_dict().items()}, **{f"D.{k}": v for k, v in D.state_dict().items()}},
        f"{a.save}/rank{rank}.pt",
    )
if distributed:
    dist.destroy_process_group()
