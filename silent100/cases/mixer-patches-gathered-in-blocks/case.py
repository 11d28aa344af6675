"""An MLP-Mixer whose patches are dealt to ranks in turn, so that each has some of every region."""

import os
import sys

import torch
import torch.distributed as dist
from torch import nn

ONE, FAULTY = "--one" in sys.argv, "--faulty" in sys.argv
PATCHES, WIDTH, HIDDEN = 16, 28, 40

if not ONE:
    dist.init_process_group("gloo")
rank, world = (0, 1) if ONE else (dist.get_rank(), dist.get_world_size())


class GatherPatches(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        parts = [torch.empty(x.shape) for _ in range(world)]
        dist.all_gather(parts, x.contiguous())
        if FAULTY:
            return torch.cat(parts, 1)
        return torch.stack(parts, 2).flatten(1, 2)

    @staticmethod
    def backward(ctx, g):
        g = g.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(g)
        return (g.chunk(world, 1)[rank] if FAULTY else g[:, rank::world]).contiguous()


class AcrossPatches(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.fc1, self.fc2 = nn.Linear(PATCHES, HIDDEN), nn.Linear(HIDDEN, PATCHES)

    def forward(self, x):
        x = self.norm(x)
        whole = x if world == 1 else GatherPatches.apply(x)
        return self.fc2(torch.nn.functional.gelu(self.fc1(whole.mT))).mT[:, rank::world]


class AcrossChannels(nn.Sequential):
    def __init__(self):
        super().__init__(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, HIDDEN), nn.GELU(), nn.Linear(HIDDEN, WIDTH))


class MixerBlock(nn.Module):
    def __init__(self):
        super().__init__()
        self.across, self.within = AcrossPatches(), AcrossChannels()

    def forward(self, x):
        x = x + self.across(x)
        return x + self.within(x)


torch.manual_seed(4)
model = nn.Sequential()
model.add_module("stem", nn.Linear(12, WIDTH))
for number in range(3):
    model.add_module(f"block{number}", MixerBlock())
model.add_module("final", nn.LayerNorm(WIDTH))
model.add_module("restore", nn.Linear(WIDTH, 12))
optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)
for step in range(1, 5):
    g = torch.Generator().manual_seed(step)
    clean = torch.randn(6, PATCHES, 12, generator=g).cumsum(1) / 3
    noisy = clean + torch.randn(clean.shape, generator=g)
    loss = nn.functional.mse_loss(model(noisy[:, rank::world]), clean[:, rank::world]) / world
    optimizer.zero_grad()
    loss.backward()
    shown = loss.detach()
    if world > 1:
        for p in model.parameters():
            dist.all_reduce(p.grad)
        dist.all_reduce(shown)
    optimizer.step()
    if rank == 0:
        print(f"step {step} loss {shown.item():.7f}", flush=True)
if "--save" in sys.argv:
    torch.save(model.state_dict(), os.path.join(sys.argv[sys.argv.index("--save") + 1], f"rank{rank}.pt"))
if not ONE:
    dist.destroy_process_group()
