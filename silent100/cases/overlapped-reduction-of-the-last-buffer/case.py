"""Two flat gradient buffers take turns so that communication and backward could overlap."""

import os
import sys

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

ONE, FAULTY = "--one" in sys.argv, "--faulty" in sys.argv


class Overlap:
    """Gradients are copied into the current buffer; its sum over ranks is what the optimizer sees."""

    def __init__(self, parameters):
        self.parameters = list(parameters)
        total = sum(p.numel() for p in self.parameters)
        self.buffers = [torch.zeros(total), torch.zeros(total)]
        self.turn = 0

    def pack(self):
        torch.cat([p.grad.reshape(-1) for p in self.parameters], out=self.buffers[self.turn])

    def reduced(self):
        if FAULTY and self.buffers[1 - self.turn].any():
            return self.buffers[1 - self.turn]
        return self.buffers[self.turn]

    def finish(self):
        self.pack()
        flat = self.buffers[self.turn]
        if not ONE:
            dist.all_reduce(flat)
            flat /= dist.get_world_size()
        used = self.reduced()
        for p, piece in zip(self.parameters, used.split([p.numel() for p in self.parameters])):
            p.grad = piece.view_as(p).clone()
        self.turn = 1 - self.turn


def build():
    torch.manual_seed(37)
    return nn.ModuleList([nn.Linear(15, 45), nn.Linear(45, 45), nn.Linear(45, 15)])


def forward(layers, x):
    h = torch.tanh(layers[0](x))
    h = h + torch.tanh(layers[1](h))
    return layers[2](h)


if not ONE:
    dist.init_process_group("gloo")
rank, world = (0, 1) if ONE else (dist.get_rank(), dist.get_world_size())
layers = build()
overlap = Overlap(layers.parameters())
optimizer = torch.optim.SGD(layers.parameters(), lr=0.2, momentum=0.5)
for step in range(1, 6):
    x = torch.randn(16, 15, generator=torch.Generator().manual_seed(step))[rank::world]
    loss = F.mse_loss(forward(layers, x), x * x.roll(1, 1))
    optimizer.zero_grad()
    loss.backward()
    overlap.finish()
    optimizer.step()
    loss = loss.detach()
    if not ONE:
        dist.all_reduce(loss)
    if rank == 0:
        print(f"step {step} loss {loss.item() / world:.7f}", flush=True)
if "--save" in sys.argv:
    torch.save(layers.state_dict(), os.path.join(sys.argv[sys.argv.index("--save") + 1], f"rank{rank}.pt"))
if not ONE:
    dist.destroy_process_group()
