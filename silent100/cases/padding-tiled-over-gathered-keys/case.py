"""A bidirectional encoder for tagging on padded rows; each rank holds half of every row and gathers keys and values."""

import os
import sys

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

one = "--one" in sys.argv
tile = "--faulty" in sys.argv
if not one:
    dist.init_process_group("gloo")
rank, world = (0, 1) if one else (dist.get_rank(), dist.get_world_size())
PAD, VOCAB, DIM, LENGTH, TAGS = 0, 50, 28, 16, 7


def gather_time(x):
    """All ranks' pieces along dimension 1, with a gradient that is summed and given back."""

    class Gather(torch.autograd.Function):
        @staticmethod
        def forward(ctx, t):
            pieces = [torch.empty_like(t) for _ in range(world)]
            dist.all_gather(pieces, t.contiguous())
            return torch.cat(pieces, 1)

        @staticmethod
        def backward(ctx, g):
            g = g.contiguous()
            dist.all_reduce(g)
            return g.chunk(world, 1)[rank]

    return Gather.apply(x) if world > 1 else x


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(DIM, DIM) for _ in range(3))
        self.dense = nn.Linear(DIM, DIM)

    def forward(self, x, keep):
        q, k, v = self.query(x), gather_time(self.key(x)), gather_time(self.value(x))
        q, k, v = (t.unflatten(-1, (2, -1)).transpose(1, 2) for t in (q, k, v))
        scores = q @ k.mT / q.shape[-1] ** 0.5
        scores = scores.masked_fill(~keep[:, None, None, :], -1e9)
        return self.dense((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))


class EncoderLayer(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention, self.norm1 = Attention(), nn.LayerNorm(DIM)
        self.up, self.down, self.norm2 = nn.Linear(DIM, 56), nn.Linear(56, DIM), nn.LayerNorm(DIM)

    def forward(self, x, keep):
        x = self.norm1(x + self.attention(x, keep))
        return self.norm2(x + self.down(F.gelu(self.up(x))))


class Tagger(nn.Module):
    def __init__(self):
        super().__init__()
        self.word = nn.Embedding(VOCAB, DIM, padding_idx=PAD)
        self.position = nn.Embedding(LENGTH, DIM)
        self.encoder = nn.ModuleList([EncoderLayer(), EncoderLayer()])
        self.classifier = nn.Linear(DIM, TAGS)

    def key_mask(self, ids):
        own = ids != PAD
        if world == 1:
            return own
        if tile:
            return own.repeat(1, world)
        pieces = [torch.empty_like(own, dtype=torch.uint8) for _ in range(world)]
        dist.all_gather(pieces, own.to(torch.uint8))
        return torch.cat(pieces, 1).bool()

    def forward(self, ids):
        keep = self.key_mask(ids)
        x = self.word(ids) + self.position(torch.arange(LENGTH).chunk(world)[rank])
        for layer in self.encoder:
            x = layer(x, keep)
        return self.classifier(x)


torch.manual_seed(12)
model = Tagger()
optimizer = torch.optim.Adam(model.parameters(), lr=3e-3, eps=1e-4)
for step in range(1, 5):
    g = torch.Generator().manual_seed(step * 3)
    ids = torch.randint(1, VOCAB, (8, LENGTH), generator=g)
    lengths = torch.randint(9, LENGTH + 1, (8, 1), generator=g)
    ids[torch.arange(LENGTH) >= lengths] = PAD
    tags = torch.where(ids == PAD, -100, (ids + ids.roll(1, 1)) % TAGS)
    count = (tags != -100).sum()
    ids, tags = ids.chunk(world, 1)[rank], tags.chunk(world, 1)[rank]
    loss = F.cross_entropy(model(ids).flatten(0, 1), tags.flatten(), reduction="sum") / count
    optimizer.zero_grad()
    loss.backward()
    loss = loss.detach()
    if world > 1:
        for p in model.parameters():
            dist.all_reduce(p.grad)
        dist.all_reduce(loss)
    optimizer.step()
    if rank == 0:
        print(f"step {step} loss {loss.item():.7f}", flush=True)
if "--save" in sys.argv:
    torch.save(model.state_dict(), os.path.join(sys.argv[sys.argv.index("--save") + 1], f"rank{rank}.pt"))
if not one:
    dist.destroy_process_group()
