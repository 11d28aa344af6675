"""A convolutional segmenter in channels-last layout, reduced by hand."""

import os
import sys

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F


class Down(nn.Module):
    def __init__(self, i, o):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(i, o, 3, 2, 1), nn.GroupNorm(2, o)

    def forward(self, x):
        return F.leaky_relu(self.norm(self.conv(x)), 0.1)


class Segmenter(nn.Module):
    def __init__(self):
        super().__init__()
        self.down1, self.down2 = Down(3, 8), Down(8, 16)
        self.lift = nn.Linear(16, 8)
        self.conv_out = nn.Conv2d(8, 2, 3, padding=1)

    def forward(self, x):
        a = self.down1(x)
        b = self.lift(self.down2(a).permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
        return {"mask": F.interpolate(self.conv_out(a + F.interpolate(b, scale_factor=2)), scale_factor=2)}


def average(model, world, careless):
    """Averages gradients over ranks, as flat vectors."""
    for p in model.parameters():
        flat = p.grad.reshape(-1)
        dist.all_reduce(flat)
        flat /= world
        if not careless:
            p.grad.copy_(flat.view(p.grad.shape))


def train(single, careless, folder):
    rank, world = (0, 1) if single else (dist.get_rank(), dist.get_world_size())
    torch.manual_seed(16)
    model = Segmenter().to(memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for step in range(1, 7):
        g = torch.Generator().manual_seed(step)
        x = torch.rand(8, 3, 12, 12, generator=g)
        y = (x.sum(1) > 1.5).long()
        part = slice(rank * 8 // world, (rank + 1) * 8 // world)
        loss = F.cross_entropy(model(x[part].contiguous(memory_format=torch.channels_last))["mask"], y[part])
        optimizer.zero_grad(set_to_none=False)
        loss.backward()
        if world > 1:
            average(model, world, careless)
        optimizer.step()
        loss = loss.detach().clone()
        if world > 1:
            dist.all_reduce(loss)
        if rank == 0:
            print(f"step {step} loss {loss.item() / world:.7f}", flush=True)
    if folder:
        torch.save(model.state_dict(), os.path.join(folder, f"rank{rank}.pt"))


if __name__ == "__main__":
    only = "--one" in sys.argv
    if not only:
        dist.init_process_group("gloo")
    train(only, "--faulty" in sys.argv, sys.argv[sys.argv.index("--save") + 1] if "--save" in sys.argv else None)
    if not only:
        dist.destroy_process_group()
