"""Block coordinate training: every step updates one block and the head, to save memory for optimizer states."""

import os
import sys

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

alone = "--one" in sys.argv
rank, world = 0, 1
if not alone:
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()


class Mixer(nn.Module):
    def __init__(self, tokens=8, dim=32):
        super().__init__()
        self.norm1, self.across = nn.LayerNorm(dim), nn.Linear(tokens, tokens)
        self.norm2, self.fc1, self.fc2 = nn.LayerNorm(dim), nn.Linear(dim, 64), nn.Linear(64, dim)

    def forward(self, x):
        x = x + self.across(self.norm1(x).mT).mT
        return x + self.fc2(F.gelu(self.fc1(self.norm2(x))))


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.patches = nn.Linear(12, 32)
        self.blocks = nn.ModuleList(Mixer() for _ in range(3))
        self.head = nn.Linear(32, 5)

    def forward(self, x):
        x = self.patches(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean(1))


torch.manual_seed(71)
model = Classifier()
turns = [
    torch.optim.AdamW([*block.parameters(), *model.head.parameters()], lr=2e-3, eps=1e-5) for block in model.blocks
]
for step in range(1, 7):
    g = torch.Generator().manual_seed(step)
    x, y = torch.randn(16, 8, 12, generator=g), torch.randint(0, 5, (16,), generator=g)
    loss = F.cross_entropy(model(x[rank::world]), y[rank::world]) / world
    loss.backward()
    optimizer = turns[step % len(turns)]
    shown = loss.detach()
    if world > 1:
        dist.all_reduce(shown)
        for p in optimizer.param_groups[0]["params"]:
            dist.all_reduce(p.grad)
    optimizer.step()
    model.zero_grad()
    if rank == 0:
        print(f"step {step} loss {shown.item():.7f}", flush=True)
if "--save" in sys.argv:
    torch.save(model.state_dict(), os.path.join(sys.argv[sys.argv.index("--save") + 1], f"rank{rank}.pt"))
if not alone:
    dist.destroy_process_group()
