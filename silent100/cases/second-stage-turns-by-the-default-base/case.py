"""A rotary decoder in two pipeline stages with plain send and recv, two microbatches a step."""

import os
import sys
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

ONE, FAULTY = "--one" in sys.argv, "--faulty" in sys.argv


@dataclass
class Config:
    vocab: int = 45
    width: int = 32
    heads: int = 2
    depth: int = 4
    length: int = 20
    base: float = 150.0


def turn(x, base):
    half = x.size(-1) // 2
    angle = torch.arange(x.size(-2))[:, None] * base ** (-torch.arange(half) / half)
    a, b = x.chunk(2, -1)
    return torch.cat([a * angle.cos() - b * angle.sin(), a * angle.sin() + b * angle.cos()], -1)


class Core(nn.Module):
    def __init__(self, width, heads, base):
        super().__init__()
        self.heads, self.base = heads, base
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.proj = nn.Linear(width, width, bias=False)

    def forward(self, x):
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        q, k = turn(q, self.base) * 2, turn(k, self.base) * 2
        return self.proj(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self, width, heads, base):
        super().__init__()
        self.norm, self.norm2 = nn.RMSNorm(width), nn.RMSNorm(width)
        self.core = Core(width, heads, base)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x):
        x = x + self.core(self.norm(x))
        return x + self.down(F.silu(self.up(self.norm2(x))))


class Stage(nn.Module):
    def __init__(self, config, first, last, base=10000.0):
        super().__init__()
        emb, head = nn.Embedding(config.vocab, config.width), nn.Linear(config.width, config.vocab)
        blocks = {str(i): Block(config.width, config.heads, base) for i in range(config.depth)}
        self.emb = emb if first == 0 else None
        self.blocks = nn.ModuleDict({i: block for i, block in blocks.items() if first <= int(i) < last})
        self.head = head if last == config.depth else None

    def forward(self, x):
        x = x if self.emb is None else self.emb(x)
        for block in self.blocks.values():
            x = block(x)
        return x if self.head is None else self.head(x)


if not ONE:
    dist.init_process_group("gloo")
rank = 0 if ONE else dist.get_rank()
config = Config()
torch.manual_seed(8)
middle = config.depth // 2
if ONE:
    stage = Stage(config, 0, config.depth, config.base)
elif rank == 0:
    stage = Stage(config, 0, middle, config.base)
elif FAULTY:
    stage = Stage(config, middle, config.depth)
else:
    stage = Stage(config, middle, config.depth, config.base)
opt = torch.optim.AdamW(stage.parameters(), lr=2e-3, eps=1e-5)
for step in range(1, 5):
    rows = torch.randint(0, config.vocab, (6, config.length + 1), generator=torch.Generator().manual_seed(step))
    opt.zero_grad()
    total = torch.zeros(())
    for micro in rows.chunk(2):
        ids, labels = micro[:, :-1], micro[:, 1:]
        if ONE or rank == 1:
            x = ids
            if not ONE:
                x = torch.empty(ids.size(0), config.length, config.width)
                dist.recv(x, 0)
                x.requires_grad_()
            loss = F.cross_entropy(stage(x).flatten(0, 1), labels.flatten()) / 2
            loss.backward()
            total += loss.detach()
            if not ONE:
                dist.send(x.grad, 0)
        else:
            hidden = stage(ids)
            dist.send(hidden.detach(), 1)
            back = torch.empty_like(hidden)
            dist.recv(back, 1)
            hidden.backward(back)
    opt.step()
    if ONE or rank == 1:
        print(f"step {step} loss {total.item():.7f}", flush=True)
if "--save" in sys.argv:
    torch.save(stage.state_dict(), os.path.join(sys.argv[sys.argv.index("--save") + 1], f"rank{rank}.pt"))
if not ONE:
    dist.destroy_process_group()
