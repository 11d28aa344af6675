"""A denoiser with FiLM blocks in two pipeline stages; diffusion times come with the data on both ranks."""

import os
import sys

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

ONE, FAULTY = "--one" in sys.argv, "--faulty" in sys.argv
CHANNELS, SIZE, MICROBATCHES, ROWS = 16, 12, 3, 12

if not ONE:
    dist.init_process_group("gloo")
rank = 0 if ONE else dist.get_rank()


def waves(times):
    frequency = 2.0 ** torch.arange(6)
    return torch.cat([(times[:, None] * frequency).sin(), (times[:, None] * frequency).cos()], -1)


class FilmBlock(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.GroupNorm(4, CHANNELS)
        self.conv = nn.Conv1d(CHANNELS, CHANNELS, 3, padding=1)
        self.film = nn.Linear(12, 2 * CHANNELS)

    def forward(self, x, features):
        scale, shift = self.film(features)[..., None].chunk(2, 1)
        return x + self.conv(F.silu(self.norm(x) * (1 + scale) + shift))


class Part(nn.Module):
    """The blocks of a stage, and what it knows of the current times."""

    def __init__(self, first, last, depth=4):
        super().__init__()
        enter, leave = nn.Conv1d(2, CHANNELS, 1), nn.Conv1d(CHANNELS, 2, 1)
        blocks = {str(i): FilmBlock() for i in range(depth)}
        self.enter = enter if first == 0 else None
        self.blocks = nn.ModuleDict({i: b for i, b in blocks.items() if first <= int(i) < last})
        self.leave = leave if last == depth else None
        self.features = None

    def forward(self, x, times):
        if self.enter is not None:
            x = self.enter(x)
            self.features = waves(times)
        elif self.features is None or not FAULTY:
            self.features = waves(times)
        for block in self.blocks.values():
            x = block(x, self.features)
        return x if self.leave is None else self.leave(x)


torch.manual_seed(13)
part = Part(0, 4) if ONE else Part(2 * rank, 2 * rank + 2)
optimizer = torch.optim.SGD(part.parameters(), lr=0.05, momentum=0.9)
for step in range(1, 5):
    g = torch.Generator().manual_seed(step)
    clean = torch.randn(ROWS, 2, SIZE, generator=g).cumsum(-1) / 3
    noise, times = torch.randn(clean.shape, generator=g), torch.rand(ROWS, generator=g)
    level = times[:, None, None]
    noisy = (1 - level).sqrt() * clean + level.sqrt() * noise
    optimizer.zero_grad()
    part.features = None
    total = torch.zeros(())
    for x, target, t in zip(*(v.chunk(MICROBATCHES) for v in (noisy, noise, times)), strict=True):
        if ONE or rank == 1:
            if not ONE:
                x = torch.empty(ROWS // MICROBATCHES, CHANNELS, SIZE)
                dist.recv(x, 0)
                x.requires_grad_()
            loss = F.mse_loss(part(x, t), target) / MICROBATCHES
            loss.backward()
            total += loss.detach()
            if not ONE:
                dist.send(x.grad, 0)
        else:
            hidden = part(x, t)
            dist.send(hidden.detach().contiguous(), 1)
            back = torch.empty(hidden.shape)
            dist.recv(back, 1)
            hidden.backward(back)
    optimizer.step()
    if ONE or rank == 1:
        print(f"step {step} loss {total.item():.7f}", flush=True)
if "--save" in sys.argv:
    torch.save(part.state_dict(), os.path.join(sys.argv[sys.argv.index("--save") + 1], f"rank{rank}.pt"))
if not ONE:
    dist.destroy_process_group()
