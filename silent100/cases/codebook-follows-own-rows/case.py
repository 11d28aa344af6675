"""A quantized autoencoder of pictures; the codebook follows the encoder by moving averages."""

import os
import sys

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

SINGLE = "--one" in sys.argv
if not SINGLE:
    dist.init_process_group("gloo")
RANK = 0 if SINGLE else dist.get_rank()
WORLD = 1 if SINGLE else dist.get_world_size()


class Quantizer(nn.Module):
    def __init__(self, codes=16, dim=8, decay=0.8):
        super().__init__()
        self.decay = decay
        start = torch.randn(codes, dim) * 0.5
        self.register_buffer("codebook", start)
        self.register_buffer("sums", start.clone())
        self.register_buffer("counts", torch.ones(codes))

    def forward(self, z):
        flat = z.movedim(1, -1)
        near = torch.cdist(flat.detach().flatten(0, -2), self.codebook).argmin(-1)
        picked = self.codebook[near].view_as(flat)
        if self.training:
            self.follow(flat.detach().flatten(0, -2), near)
        commit = F.mse_loss(flat, picked)
        return (flat + (picked - flat).detach()).movedim(-1, 1), commit

    @torch.no_grad()
    def follow(self, vectors, near):
        hot = F.one_hot(near, len(self.counts)).float()
        counts, sums = hot.sum(0), hot.T @ vectors
        if WORLD > 1 and "--faulty" not in sys.argv:
            dist.all_reduce(counts)
            dist.all_reduce(sums)
        self.counts.lerp_(counts, 1 - self.decay)
        self.sums.lerp_(sums, 1 - self.decay)
        total = self.counts.sum()
        smooth = (self.counts + 1e-3) / (total + 1e-3 * len(counts)) * total
        self.codebook = self.sums / smooth[:, None]


class Autoencoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(nn.Conv2d(1, 12, 4, 2, 1), nn.ReLU(), nn.Conv2d(12, 8, 3, padding=1))
        self.quantizer = Quantizer()
        self.decoder = nn.Sequential(nn.Conv2d(8, 12, 3, padding=1), nn.ReLU(), nn.ConvTranspose2d(12, 1, 4, 2, 1))

    def forward(self, x):
        codes, commit = self.quantizer(self.encoder(x))
        return F.mse_loss(self.decoder(codes), x) + 0.25 * commit


torch.manual_seed(77)
net = Autoencoder()
optimizer = torch.optim.Adam(net.parameters(), lr=2e-3)
for step in range(1, 6):
    pictures = torch.rand(6, 1, 8, 8, generator=torch.Generator().manual_seed(step))
    loss = net(pictures.chunk(WORLD)[RANK])
    optimizer.zero_grad()
    loss.backward()
    shown = loss.detach() / WORLD
    if WORLD > 1:
        grads = torch.cat([p.grad.flatten() for p in net.parameters()] + [shown[None]])
        dist.all_reduce(grads)
        shown, at = grads[-1], 0
        for p in net.parameters():
            p.grad.copy_(grads[at : at + p.numel()].view_as(p) / WORLD)
            at += p.numel()
    optimizer.step()
    if RANK == 0:
        print(f"step {step} loss {shown.item():.7f}", flush=True)
if "--save" in sys.argv:
    torch.save(net.state_dict(), os.path.join(sys.argv[sys.argv.index("--save") + 1], f"rank{RANK}.pt"))
if WORLD > 1:
    dist.destroy_process_group()
