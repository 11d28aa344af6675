"""A model that sends its activations through one block four times, sharded by FSDP2."""

import copy
import os
import sys

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

ONE, FAULTY = "--one" in sys.argv, "--faulty" in sys.argv
DIM, WORDS, PASSES = 28, 50, 4


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(DIM), nn.LayerNorm(DIM)
        self.attn = nn.MultiheadAttention(DIM, 4, batch_first=True, bias=False)
        self.ffn = nn.Sequential(nn.Linear(DIM, 56), nn.GELU(), nn.Linear(56, DIM))

    def forward(self, x, mask):
        h = self.norm1(x)
        x = x + self.attn(h, h, h, attn_mask=mask, need_weights=False)[0]
        return x + self.ffn(self.norm2(x))


class Albert(nn.Module):
    """Words in a narrow table, one block for all passes."""

    def __init__(self):
        super().__init__()
        self.narrow, self.widen = nn.Embedding(WORDS, 12), nn.Linear(12, DIM)
        self.places = nn.Parameter(torch.randn(16, DIM) * 0.02)
        self.passes = nn.ModuleList([Block()] * PASSES)
        self.say = nn.Linear(DIM, WORDS)

    def forward(self, ids):
        x = self.widen(self.narrow(ids)) + self.places[: ids.shape[1]]
        mask = torch.ones(ids.shape[1], ids.shape[1], dtype=torch.bool).triu(1)
        for block in self.passes:
            x = block(x, mask)
        return self.say(x)


def own_modules(layers):
    """Gives every layer an object of its own, as a wrapper would that handles a module once."""
    return nn.ModuleList(copy.deepcopy(layer) for layer in layers)


rank, world = 0, 1
torch.manual_seed(32)
albert = Albert()
if not ONE:
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    if FAULTY:
        albert.passes = own_modules(albert.passes)
    fully_shard(albert)
opt = torch.optim.AdamW(albert.parameters(), lr=2e-3, eps=1e-3)
for step in range(1, 5):
    ids = torch.randint(0, WORDS, (8, 13), generator=torch.Generator().manual_seed(step)).chunk(world)[rank]
    loss = F.cross_entropy(albert(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
    opt.zero_grad()
    loss.backward()
    opt.step()
    loss = loss.detach()
    if world > 1:
        dist.all_reduce(loss)
    if rank == 0:
        print(f"step {step} loss {loss.item() / world:.7f}", flush=True)
if "--save" in sys.argv:
    state = {k: v.full_tensor() if isinstance(v, DTensor) else v for k, v in albert.state_dict().items()}
    torch.save(state, os.path.join(sys.argv[sys.argv.index("--save") + 1], f"rank{rank}.pt"))
if world > 1:
    dist.destroy_process_group()
