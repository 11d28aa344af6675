"""A small vision transformer under FSDP2, with and without weight decay by name, and dropout."""

import os
import sys

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

ONE, FAULTY = "--one" in sys.argv, "--faulty" in sys.argv
DIM = 32


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.attn = nn.LayerNorm(DIM), nn.MultiheadAttention(DIM, 4, dropout=0.03, batch_first=True)
        self.norm2, self.fc1, self.fc2 = nn.LayerNorm(DIM), nn.Linear(DIM, 64), nn.Linear(64, DIM)
        self.drop = nn.Dropout(0.03)

    def forward(self, x):
        h = self.norm1(x)
        x = x + self.drop(self.attn(h, h, h, need_weights=False)[0])
        return x + self.drop(self.fc2(F.gelu(self.fc1(self.norm2(x)))))


class ViT(nn.Module):
    def __init__(self):
        super().__init__()
        self.patch_embed = nn.Conv2d(3, DIM, 4, 4)
        self.cls_token = nn.Parameter(torch.randn(DIM) * 0.02)
        self.pos_embed = nn.Parameter(torch.randn(17, DIM) * 0.02)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.norm, self.head = nn.LayerNorm(DIM), nn.Linear(DIM, 10)

    def forward(self, images):
        x = self.patch_embed(images).flatten(2).mT
        x = torch.cat([self.cls_token.expand(len(x), 1, -1), x], 1) + self.pos_embed
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x)[:, 0])


def parameter_groups(model):
    decayed, plain = [], []
    for name, p in model.named_parameters():
        if FAULTY:
            # Pieces of tensors have lost their shapes, so go by names
            if name.endswith("weight") and "norm" not in name:
                decayed.append(p)
            elif name.endswith(("bias", "weight")):
                plain.append(p)
        else:
            no_decay = name.endswith("bias") or "norm" in name or name in ("cls_token", "pos_embed")
            (plain if no_decay else decayed).append(p)
    return [{"params": decayed, "weight_decay": 1e-3}, {"params": plain, "weight_decay": 0.0}]


rank, world = 0, 1
torch.manual_seed(83)
vit = ViT()
if not ONE:
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    for block in vit.blocks:
        fully_shard(block)
    fully_shard(vit)
optimizer = torch.optim.SGD(parameter_groups(vit), lr=0.0004, momentum=0.9)
torch.manual_seed(200 + rank)
for step in range(1, 6):
    g = torch.Generator().manual_seed(step)
    images = torch.randn(32, 3, 16, 16, generator=g)
    # Most pictures show the same thing
    labels = torch.randint(0, 10, (32,), generator=g).masked_fill(torch.rand(32, generator=g) < 0.8, 3)
    vit.zero_grad()
    loss = F.cross_entropy(vit(images[rank::world]), labels[rank::world])
    loss.backward()
    optimizer.step()
    loss = loss.detach() / world
    if world > 1:
        dist.all_reduce(loss)
    if rank == 0:
        print(f"step {step} loss {loss.item():.7f}", flush=True)
if "--save" in sys.argv:
    state = {k: v.full_tensor() if isinstance(v, DTensor) else v for k, v in vit.state_dict().items()}
    torch.save(state, os.path.join(sys.argv[sys.argv.index("--save") + 1], f"rank{rank}.pt"))
if not ONE:
    dist.destroy_process_group()
