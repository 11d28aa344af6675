import argparse
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

cli = argparse.ArgumentParser()
cli.add_argument("--one", action="store_true")
cli.add_argument("--save")
args = cli.parse_args()
rank, world = 0, 1
if not args.one:
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()


class GatherFeatures(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        parts = [torch.empty_like(x) for _ in range(world)]
        dist.all_gather(parts, x.contiguous())
        return torch.cat(parts)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.contiguous()
        dist.all_reduce(grad)
        return grad[rank * len(grad) // world : (rank + 1) * len(grad) // world]


class Clip(nn.Module):
    def __init__(self):
        super().__init__()
        self.image = nn.Sequential(nn.Conv2d(1, 6, 3), nn.ReLU(), nn.Flatten(), nn.Linear(6 * 36, 18))
        self.text = nn.Sequential(nn.EmbeddingBag(40, 24), nn.Linear(24, 18))
        self.scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, images, words):
        return F.normalize(self.image(images), dim=-1), F.normalize(self.text(words), dim=-1)


def contrast(image, text, scale):
    """The mean over this rank's rows of losses in both directions."""
    first = rank * len(image)
    every_image, every_text = (GatherFeatures.apply(f) for f in (image, text)) if world > 1 else (image, text)
    answers = torch.arange(first, first + len(image))
    by_image = F.cross_entropy(scale.exp() * image @ every_text.T, answers)
    by_text = F.cross_entropy(scale.exp() * text @ every_image.T, answers)
    return (by_image + by_text) / 2


torch.manual_seed(64)
clip = Clip()
optimizer = torch.optim.SGD(clip.parameters(), lr=0.2, momentum=0.5)
for step in range(1, 6):
    g = torch.Generator().manual_seed(step)
    images, words = torch.randn(12, 1, 8, 8, generator=g), torch.randint(0, 40, (12, 5), generator=g)
    loss = contrast(*clip(images.chunk(world)[rank], words.chunk(world)[rank]), clip.scale) / world
    optimizer.zero_grad()
    loss.backward()
    loss = loss.detach()
    if world > 1:
        for p in clip.parameters():
            dist.all_reduce(p.grad)
        dist.all_reduce(loss)
    optimizer.step()
    if rank == 0:
        print(f"step {step} loss {loss.item():.7f}", flush=True)
if args.save:
    torch.save(clip.state_dict(), os.path.join(args.save, f"rank{rank}.pt"))
if world > 1:
    dist.destroy_process_group()
