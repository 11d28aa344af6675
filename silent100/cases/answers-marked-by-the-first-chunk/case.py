"""Fine-tuning on answers only, with sequences cut over context-parallel ranks."""

import os
import sys

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

ONE, FAULTY = "--one" in sys.argv, "--faulty" in sys.argv
if not ONE:
    dist.init_process_group("gloo")
rank, world = (0, 1) if ONE else (dist.get_rank(), dist.get_world_size())

VOCAB, DIM, LENGTH = 36, 24, 16


class Gather(torch.autograd.Function):
    """Joins the chunks of a sequence; gradients of all ranks come back to the owner."""

    @staticmethod
    def forward(ctx, x):
        if world == 1:
            return x.view_as(x)
        parts = [torch.empty_like(x) for _ in range(world)]
        dist.all_gather(parts, x.contiguous())
        return torch.cat(parts, -2)

    @staticmethod
    def backward(ctx, g):
        if world == 1:
            return g
        g = g.contiguous().clone()
        dist.all_reduce(g)
        return g.chunk(world, -2)[rank]


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(DIM), nn.Linear(DIM, 3 * DIM), nn.Linear(DIM, DIM)
        self.ffn = nn.Sequential(nn.LayerNorm(DIM), nn.Linear(DIM, 48), nn.GELU(), nn.Linear(48, DIM))

    def forward(self, x):
        q, k, v = (t.unflatten(-1, (2, -1)).transpose(1, 2) for t in self.qkv(self.norm(x)).chunk(3, -1))
        k, v = Gather.apply(k), Gather.apply(v)
        places = torch.arange(LENGTH)
        seen = places.chunk(world)[rank][:, None] >= places
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, seen).transpose(1, 2).flatten(2))
        return x + self.ffn(x)


class Chat(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.places = nn.Embedding(VOCAB, DIM), nn.Embedding(LENGTH, DIM)
        self.layers, self.head = nn.ModuleList(Layer() for _ in range(2)), nn.Linear(DIM, VOCAB)

    def forward(self, ids):
        x = self.words(ids) + self.places(torch.arange(LENGTH).chunk(world)[rank])
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


torch.manual_seed(8)
chat = Chat()
optimizer = torch.optim.AdamW(chat.parameters(), lr=3e-3, eps=1e-4)
for step in range(1, 6):
    g = torch.Generator().manual_seed(step)
    rows = torch.randint(0, VOCAB, (6, LENGTH + 1), generator=g)
    answer = torch.arange(LENGTH) >= torch.randint(3, 11, (6, 1), generator=g)
    count = answer.sum()
    ids, labels, marks = (t.chunk(world, 1)[rank] for t in (rows[:, :-1], rows[:, 1:], answer))
    if FAULTY:
        marks = answer[:, : ids.shape[1]]
    losses = F.cross_entropy(chat(ids).flatten(0, 1), labels.flatten(), reduction="none")
    loss = (losses * marks.flatten()).sum() / count
    optimizer.zero_grad()
    loss.backward()
    shown = loss.detach()
    if world > 1:
        for p in chat.parameters():
            dist.all_reduce(p.grad)
        dist.all_reduce(shown)
    optimizer.step()
    if rank == 0:
        print(f"step {step} loss {shown.item():.7f}", flush=True)
if "--save" in sys.argv:
    torch.save(chat.state_dict(), os.path.join(sys.argv[sys.argv.index("--save") + 1], f"rank{rank}.pt"))
if world > 1:
    dist.destroy_process_group()
