"""Pictures and captions: each rank scores its pictures against all captions, chunk by chunk.

The temperature is learnt.
"""

import argparse
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

flags = argparse.ArgumentParser(description=__doc__)
flags.add_argument("--one", action="store_true")
flags.add_argument("--faulty", action="store_true")
flags.add_argument("--save")
flags = flags.parse_args()
rank, world = 0, 1
if not flags.one:
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()


class Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        parts = [torch.empty_like(x) for _ in range(world)]
        dist.all_gather(parts, x.contiguous())
        return torch.stack(parts)

    @staticmethod
    def backward(ctx, g):
        g = g.contiguous().clone()
        dist.all_reduce(g)
        return g[rank]


class Clip(nn.Module):
    def __init__(self):
        super().__init__()
        self.picture = nn.Sequential(nn.Linear(11, 32), nn.Tanh(), nn.Linear(32, 8))
        self.caption = nn.Sequential(nn.Linear(7, 32), nn.Tanh(), nn.Linear(32, 8))
        self.log_scale = nn.Parameter(torch.tensor(1.2))

    def forward(self, a, b):
        return F.normalize(self.picture(a), dim=1), F.normalize(self.caption(b), dim=1)


def whole_loss(a, b, scale, total):
    return F.cross_entropy(scale * a @ b.T, torch.arange(len(a)), reduction="sum") / total


def sharded_loss(a, b, scale, total):
    """Logits of a chunk of captions at a time; only the largest piece is alive."""
    pieces = [scale * a @ part.T for part in Gather.apply(b)]
    own = pieces[rank].diagonal()
    return (torch.stack([p.logsumexp(1) for p in pieces]).logsumexp(0) - own).sum() / total


torch.manual_seed(16)
clip = Clip()
optimizer = torch.optim.Adam(clip.parameters(), lr=5e-3, eps=1e-4)
for step in range(1, 6):
    g = torch.Generator().manual_seed(step)
    core = torch.randn(12, 5, generator=g)
    pictures = torch.cat([core, torch.randn(12, 6, generator=g)], 1).chunk(world)[rank]
    captions = torch.cat([core**2, torch.randn(12, 2, generator=g)], 1).chunk(world)[rank]
    a, b = clip(pictures, captions)
    scale = clip.log_scale.exp()
    if flags.one:
        loss = whole_loss(a, b, scale, 12)
    else:
        loss = sharded_loss(a, b, scale.item() if flags.faulty else scale, 12)
    optimizer.zero_grad()
    loss.backward()
    shown = loss.detach()
    if world > 1:
        for p in clip.parameters():
            if p.grad is not None:
                dist.all_reduce(p.grad)
        dist.all_reduce(shown)
    optimizer.step()
    if rank == 0:
        print(f"step {step} loss {shown.item():.7f}", flush=True)
if flags.save:
    torch.save(clip.state_dict(), os.path.join(flags.save, f"rank{rank}.pt"))
if world > 1:
    dist.destroy_process_group()
