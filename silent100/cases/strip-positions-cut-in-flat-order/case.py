"""A patch encoder over images cut in a left and a right half, keys and values gathered from both."""

import argparse
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

cli = argparse.ArgumentParser()
cli.add_argument("--one", action="store_true")
cli.add_argument("--faulty", action="store_true")
cli.add_argument("--save")
args = cli.parse_args()
if not args.one:
    dist.init_process_group("gloo")
RANK, WORLD = (0, 1) if args.one else (dist.get_rank(), dist.get_world_size())
GRID, PATCH, DIM, HEADS, CLASSES = 6, 4, 32, 4, 6


class AllPatches(torch.autograd.Function):
    """Joins what the ranks have along dimension 1; the gradient is summed and cut."""

    @staticmethod
    def forward(ctx, x):
        parts = [torch.empty(x.shape) for _ in range(WORLD)]
        dist.all_gather(parts, x.contiguous())
        return torch.cat(parts, 1)

    @staticmethod
    def backward(ctx, g):
        g = g.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(g)
        return g.chunk(WORLD, 1)[RANK].contiguous()


def all_patches(x):
    return x if WORLD == 1 else AllPatches.apply(x)


class Places(nn.Module):
    """A learned vector for each patch of the whole image."""

    def __init__(self):
        super().__init__()
        self.table = nn.Parameter(torch.randn(GRID * GRID, DIM) * 0.5)

    def forward(self, x):
        if args.faulty:
            return x + self.table.chunk(WORLD)[RANK]
        return x + self.table.unflatten(0, (GRID, GRID)).chunk(WORLD, 1)[RANK].flatten(0, 1)


class Look(nn.Module):
    def __init__(self):
        super().__init__()
        self.query, self.value = nn.Linear(DIM, DIM), nn.Linear(DIM, DIM)
        self.key = nn.Linear(DIM, DIM, bias=False)
        self.out = nn.Linear(DIM, DIM)

    def forward(self, x):
        q, k, v = self.query(x), all_patches(self.key(x)), all_patches(self.value(x))
        q, k, v = (t.unflatten(-1, (HEADS, -1)).transpose(1, 2) for t in (q, k, v))
        return self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class Stack(nn.Module):
    def __init__(self):
        super().__init__()
        self.look, self.norm = Look(), nn.LayerNorm(DIM)
        self.fc = nn.Sequential(nn.LayerNorm(DIM), nn.Linear(DIM, 64), nn.GELU(), nn.Linear(64, DIM))

    def forward(self, x):
        x = x + self.look(self.norm(x))
        return x + self.fc(x)


class Vision(nn.Module):
    def __init__(self):
        super().__init__()
        self.patches = nn.Conv2d(3, DIM, PATCH, stride=PATCH)
        self.places = Places()
        self.stacks = nn.Sequential(Stack(), Stack())
        self.classes = nn.Linear(DIM, CLASSES)

    def forward(self, images):
        x = self.places(self.patches(images).flatten(2).mT)
        x = self.stacks(x)
        return self.classes(all_patches(x).mean(1))


torch.manual_seed(31)
model = Vision()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
for step in range(1, 5):
    g = torch.Generator().manual_seed(step)
    images = torch.randn(6, 3, GRID * PATCH, GRID * PATCH, generator=g).cumsum(2).cumsum(3) / 20
    labels = torch.randint(0, CLASSES, (6,), generator=g)
    # Every rank has the same loss, so its part of the gradient is a share of it
    loss = F.cross_entropy(model(images.chunk(WORLD, 3)[RANK]), labels)
    optimizer.zero_grad()
    (loss / WORLD).backward()
    if WORLD > 1:
        for p in model.parameters():
            dist.all_reduce(p.grad)
    optimizer.step()
    if RANK == 0:
        print(f"step {step} loss {loss.item():.7f}", flush=True)
if args.save:
    torch.save(model.state_dict(), os.path.join(args.save, f"rank{RANK}.pt"))
if not args.one:
    dist.destroy_process_group()
