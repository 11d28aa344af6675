"""A denoiser with an exponential moving average of its weights; a checkpoint after every second update."""

import os
import sys
import tempfile

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP

one, faulty = "--one" in sys.argv, "--faulty" in sys.argv
if not one:
    dist.init_process_group("gloo")
rank = 0 if one else dist.get_rank()
world = 1 if one else dist.get_world_size()


class Denoiser(nn.Module):
    def __init__(self, dim=16, width=56):
        super().__init__()
        self.time = nn.Embedding(10, width)
        self.enter, self.leave = nn.Linear(dim, width), nn.Linear(width, dim)
        self.hidden = nn.ModuleList(nn.Linear(width, width) for _ in range(2))

    def forward(self, x, t):
        h = self.enter(x) + self.time(t)
        for layer in self.hidden:
            h = h + nn.functional.silu(layer(h))
        return self.leave(h)


class Average:
    def __init__(self, model, decay=0.8):
        self.decay = decay
        self.shadow = [p.detach().clone() for p in model.parameters()]
        self.kept = None

    @torch.no_grad()
    def update(self, model):
        for s, p in zip(self.shadow, model.parameters()):
            s.lerp_(p, 1 - self.decay)

    @torch.no_grad()
    def swap_in(self, model):
        self.kept = [p.detach().clone() for p in model.parameters()]
        for s, p in zip(self.shadow, model.parameters()):
            p.copy_(s)

    @torch.no_grad()
    def swap_out(self, model):
        for k, p in zip(self.kept, model.parameters()):
            p.copy_(k)


def save_average(model, average):
    average.swap_in(model)
    torch.save(model.state_dict(), os.path.join(tempfile.mkdtemp(), "average.pt"))
    if not faulty:
        average.swap_out(model)


torch.manual_seed(3)
net = Denoiser()
model = net if one else DDP(net)
average = Average(net)
optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
for step in range(1, 6):
    g = torch.Generator().manual_seed(step)
    clean, noise = torch.randn(24, 16, generator=g), torch.randn(24, 16, generator=g)
    t = torch.randint(0, 10, (24,), generator=g)
    noisy = clean + noise * (t[:, None] / 10)
    mine = slice(rank, None, world)
    loss = nn.functional.mse_loss(model(noisy[mine], t[mine]), noise[mine])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    average.update(net)
    if step % 2 == 0 and rank == 0:
        save_average(net, average)
    shown = loss.detach()
    if not one:
        dist.all_reduce(shown)
    if rank == 0:
        print(f"step {step} loss {shown.item() / world:.7f}", flush=True)
if "--save" in sys.argv:
    torch.save(net.state_dict(), os.path.join(sys.argv[sys.argv.index("--save") + 1], f"rank{rank}.pt"))
if not one:
    del model  # before its process group
    dist.destroy_process_group()
