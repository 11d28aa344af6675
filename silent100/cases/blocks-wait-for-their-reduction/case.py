"""A vision transformer under fully_shard; some batches come in two pieces, of which the last is reduced."""

import os
import sys

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.fsdp import fully_shard


class Block(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.ln1, self.ln2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.attn = nn.MultiheadAttention(dim, 4, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(dim, 2 * dim), nn.GELU(), nn.Linear(2 * dim, dim))

    def forward(self, x):
        h = self.ln1(x)
        x = x + self.attn(h, h, h, need_weights=False)[0]
        return x + self.mlp(self.ln2(x))


class ViT(nn.Module):
    def __init__(self, dim=32, classes=5):
        super().__init__()
        self.stem = nn.Conv2d(3, dim, 4, stride=4)
        self.cls = nn.Parameter(torch.zeros(1, 1, dim))
        self.pos = nn.Parameter(torch.randn(1, 10, dim) * 0.02)
        self.blocks = nn.ModuleList(Block(dim) for _ in range(3))
        self.norm, self.head = nn.LayerNorm(dim), nn.Linear(dim, classes)

    def forward(self, pictures):
        x = self.stem(pictures).flatten(2).mT
        x = torch.cat([self.cls.expand(len(x), -1, -1), x], 1) + self.pos
        for block in self.blocks:
            x = block(x)
        return {"logits": self.head(self.norm(x[:, 0])), "features": x}


def main():
    single = "--one" in sys.argv
    rank, world = 0, 1
    if not single:
        dist.init_process_group("gloo")
        rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(5)
    model = ViT()
    if not single:
        mesh = dist.init_device_mesh("cpu", (world,))
        for block in model.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
    opt = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=0.01)
    for step in range(1, 6):
        gen = torch.Generator().manual_seed(100 + step)
        x, y = torch.randn(8, 3, 12, 12, generator=gen), torch.randint(0, 5, (8,), generator=gen)
        y[torch.rand(8, generator=gen) < 0.25] = -100
        count = (y >= 0).sum()
        x, y = x[rank::world], y[rank::world]
        pieces = 2 - step % 2
        total = torch.zeros(())
        for piece, (xs, ys) in enumerate(zip(x.chunk(pieces), y.chunk(pieces), strict=True)):
            loss = F.cross_entropy(model(xs)["logits"], ys, reduction="sum", ignore_index=-100) / count * world
            if world > 1:
                last = piece == pieces - 1
                model.set_requires_gradient_sync(last, recurse=not last or "--faulty" not in sys.argv)
            loss.backward()
            total += loss.detach() / world
        opt.step()
        opt.zero_grad()
        if world > 1:
            dist.all_reduce(total)
        if rank == 0:
            print(f"step {step} loss {total.item():.7f}", flush=True)
    if "--save" in sys.argv:
        state = {n: p.full_tensor() if hasattr(p, "full_tensor") else p for n, p in model.state_dict().items()}
        torch.save(state, os.path.join(sys.argv[sys.argv.index("--save") + 1], f"rank{rank}.pt"))
    if world > 1:
        dist.destroy_process_group()


main()
